"""English text that comes with CPython: the language reference that ``help()`` prints, by letter.

The text differs a little between versions of Python, and with it the perplexity.
"""

from __future__ import annotations

from pathlib import Path

import torch

from syncline.errors import UserError
from syncline.training.data.spec import TextData, TextDataSpec

__all__ = ["DATA", "load"]

VALIDATION_FRACTION = 0.1


def load(folder: Path) -> TextData:  # noqa: ARG001
    """Load the text as characters; the last tenth is for validation.

    Args:
        folder: not read.

    Raises:
        UserError: this Python was installed without the text.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "data set 'text' is the module pydoc_data.topics of CPython, which this Python was "
            "installed without; name another data set with --data"
        ) from None
    content = "\n\n".join(topics[name] for name in sorted(topics))
    letters = sorted(set(content))
    number = {letter: index for index, letter in enumerate(letters)}
    stream = torch.tensor([number[letter] for letter in content])
    validation = int(len(stream) * VALIDATION_FRACTION)
    return TextData(
        vocabulary=len(letters),
        train=stream[:-validation],
        validation=stream[-validation:],
        test=None,
    )


DATA = TextDataSpec(
    name="text",
    summary="the text of Python's help(), which comes with CPython, by letter",
    folder=None,
    load=load,
)
