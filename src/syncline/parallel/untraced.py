"""Classes whose methods ``torch.compile`` does not look into.

C++ code of torch calls a process group from wherever it is, the compiled forward pass of a wrapped
model among others; what is being compiled then takes every Python function for a part of it.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["untraced"]

Class = TypeVar("Class", bound=type[Any])


def untraced(cls: Class) -> Class:
    """Let the methods of a class, and all that they call, run as they are.

    ``torch.compiler.disable`` does so by a wrapper that takes 0.4 us a call, an eighth of what our
    Python takes in a small collective. This marks their code.
    """
    skip = eval_frame._FrameAction.SKIP
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, FunctionType):
            eval_frame.set_code_exec_strategy(
                function.__code__, eval_frame._FrameExecStrategy(skip, skip)
            )
    return cls
