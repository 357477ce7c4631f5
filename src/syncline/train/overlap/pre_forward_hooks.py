"""Pre-forward hooks: a module's parameters are updated just before it runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from syncline.torch_private import compiled_call, is_compiled, set_compiled_call
from syncline.train.measure.gradient_hooks import ModuleHook, take_off
from syncline.train.overlap.deferral import Deferral
from syncline.train.overlap.pending import finish_all


class PreForwardHooks:
    """Hooks on every module that holds exchanged parameters, between ``attach`` and ``detach``.

    A hook waits for the parameters that its module owns. If gradients are disabled, it also waits
    for those of all modules inside: torch may then take a path that reads the children's weights
    (``TransformerEncoderLayer``), but only if they are plain tensors. The hook of a compiled module
    always waits for them, since hooks inside would be compiled with it.
    """

    def __init__(self, module: nn.Module, deferral: Deferral) -> None:
        self._module = module
        self._deferral = deferral
        self._handles: list[RemovableHandle] = []
        self._compiled: list[tuple[nn.Module, Any]] = []
        # Modules outlive their wrapper: when it is dropped, the hooks are removed.
        self.detach = weakref.finalize(self, _remove, self._handles, self._compiled)
        self.detach.atexit = False

    def attach(self) -> None:
        """Add the hooks."""
        torch.compiler.assume_constant_result(_PreForwardHook.compile)
        if isinstance(self._module, torch.jit.ScriptModule):
            self._deferral.note_compiled(self._indices(self._module, recurse=True))
        else:
            self._visit("", self._module, set())

    def _visit(self, name: str, module: nn.Module, seen: set[nn.Module]) -> None:
        if module in seen or isinstance(module, torch.jit.ScriptModule):
            return
        seen.add(module)
        held = self._indices(module, recurse=True)
        label = name or type(module).__name__
        if is_compiled(module):
            self._visit_compiled(module, _CompiledPreForwardHook(self._deferral, label, held, held))
            return
        if held:
            hook = _PreForwardHook(self._deferral, label, self._own(module), held)
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
        for child_name, child in module.named_children():
            self._visit(f"{name}.{child_name}" if name else child_name, child, seen)

    def _visit_compiled(self, module: nn.Module, hook: _CompiledPreForwardHook) -> None:
        call = compiled_call(module)
        if call is None:
            add = module.register_forward_pre_hook
            self._handles.append(add(hook, prepend=True, with_kwargs=True))
            return

        def hooked(*args: Any, **kwargs: Any) -> Any:
            hook(None, args, kwargs)
            return call(*args, **kwargs)

        self._compiled.append((module, call))
        set_compiled_call(module, hooked)

    def _own(self, module: nn.Module) -> list[int]:
        """Return a module's own parameters, and those of scripted children, which take no hooks."""
        scripted = [c for c in module.children() if isinstance(c, torch.jit.ScriptModule)]
        return [
            *self._indices(module, recurse=False),
            *(index for child in scripted for index in self._indices(child, recurse=True)),
        ]

    def _indices(self, module: nn.Module, *, recurse: bool) -> list[int]:
        known = self._deferral.index_of
        return [known[id(p)] for p in module.parameters(recurse=recurse) if id(p) in known]


class _PreForwardHook(ModuleHook):
    """The hook of one module."""

    def __init__(
        self, deferral: Deferral, label: str, own: Sequence[int], held: Sequence[int]
    ) -> None:
        # A module refers to its hook, which must keep neither the engine nor the wrapper alive.
        self._deferral = weakref.ref(deferral)
        self._label = label
        self._own = own
        self._held = held

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.compile()
            return
        deferral = self._deferral()
        if deferral is None:
            return
        if deferral.anything_deferred:
            deferral.make_updates(self._label, self._own if torch.is_grad_enabled() else self._held)
        elif deferral.stream is not None:
            deferral.wait_for_stream()  # updates may have been made on another one

    def compile(self) -> None:
        """Called while code is compiled: finish the parameters now and before each forward pass."""
        deferral = self._deferral()
        if deferral is not None:
            deferral.note_compiled(self._own)
            deferral.make_updates(self._label, self._own)


class _CompiledPreForwardHook(_PreForwardHook):
    """The hook of a compiled module, whose code cannot take pending tensors."""

    def __call__(self, _: Any, args: Any, kwargs: Any) -> None:
        super().__call__()
        finish_all((args, kwargs))


def _remove(handles: list[RemovableHandle], compiled: list[tuple[nn.Module, Any]]) -> None:
    take_off(handles)
    for module, call in compiled:
        set_compiled_call(module, call)
