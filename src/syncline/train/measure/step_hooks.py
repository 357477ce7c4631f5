"""Hooks on the steps of all optimizers; they keep no object alive.

Torch keeps such hooks until they are removed, and a step fails if one is removed meanwhile. So
objects, which the garbage collector may free in the middle of a step, cannot remove hooks of their
own. Instead, torch gets one hook of ours for each moment, which calls the objects still alive.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from syncline.torch_private import disable_dynamo

Method = Callable[..., Any]
"""Takes the optimizer and the positional and named arguments of ``step``, and may return other
arguments, as torch's hooks do."""


class StepHooks:
    """Methods to call at one moment of every optimizer's step."""

    def __init__(self, register: Callable[[Method], RemovableHandle]) -> None:
        self._register = register
        self._handle: RemovableHandle | None = None
        self._lock = threading.Lock()
        self._methods: tuple[tuple[weakref.WeakMethod[Method], tuple[Any, ...]], ...] = ()
        """Replaced, never changed: a step of another thread may be iterating over them."""

    def add(self, method: Method, *first: Any) -> None:
        """Call a method in every step, as long as its object lives, or until it is removed.

        It gets the arguments ``first`` before the others.
        """
        with self._lock:
            self._set([*self.alive(), (method, first)])

    def remove(self, method: Method) -> None:
        """Stop calling a method; not during a step."""
        with self._lock:
            self._set([kept for kept in self.alive() if kept[0] != method])

    def alive(self) -> list[tuple[Method, tuple[Any, ...]]]:
        """Return the methods whose objects live, with their first arguments."""
        return [(method, first) for each, first in self._methods if (method := each()) is not None]

    def _set(self, methods: Sequence[tuple[Method, tuple[Any, ...]]]) -> None:
        self._methods = tuple((weakref.WeakMethod(method), first) for method, first in methods)
        if methods and self._handle is None:
            self._handle = self._register(self.call)
        elif not methods and self._handle is not None:
            self._handle.remove()
            self._handle = None

    @disable_dynamo
    def call(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Call the methods; return the arguments as they have left them."""
        for reference, first in self._methods:
            method = reference()
            changed = None if method is None else method(*first, optimizer, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        return args, kwargs


before_steps = StepHooks(register_optimizer_step_pre_hook)
after_steps = StepHooks(register_optimizer_step_post_hook)
after_gathers = StepHooks(lambda _: RemovableHandle(OrderedDict()))
"""After updated parameters were gathered at the end of a sharded step."""
