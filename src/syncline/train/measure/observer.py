"""Hooks that record the events of a training iteration, without a change to the model."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from syncline.torch_private import compiled_call, is_compiled, sequence_number_of
from syncline.train.measure.clock import Clock
from syncline.train.measure.gradient_hooks import GradientHooks, ModuleHook, take_off, weakly
from syncline.train.measure.step_hooks import after_gathers, after_steps, before_steps


class Moment(Enum):
    """What happens; the comments say what an event's key is, if it has one."""

    FORWARD = "forward"  # the model's forward begins: the iteration begins
    ENTER = "enter"  # a submodule's forward begins; key: its name
    EXIT = "exit"  # it ends
    ACCUMULATE = "accumulate"  # the first forward pass of several is over
    RESUME = "resume"  # the last of several begins, after which gradients are exchanged
    OUTPUT = "output"  # the model's forward is over
    WALKED = "walked"  # our own walk of the autograd graph is over, in detailed iterations
    NODE = "node"  # a backward operation begins; key: its index in the autograd graph
    READY = "ready"  # a gradient is final and, under DDP, in its bucket; key: parameter name
    STEP = "step"  # the optimizer begins
    STEPPED = "stepped"  # the optimizer is done
    GATHERED = "gathered"  # where it is sharded: all ranks have all parameters


class ObservedEvent(NamedTuple):
    """A moment with the clock's stamp."""

    moment: Moment
    key: str | int
    stamp: Any


class ObservedIteration(NamedTuple):
    """The events of one iteration, in order."""

    events: list[ObservedEvent]
    end_stamp: Any  # when the next iteration began
    graph: AutogradGraph | None  # in detailed iterations only
    sequence_at: list[int]
    """Autograd's sequence number at each event up to ``OUTPUT``, in detailed iterations."""
    quiet: bool = False  # whether only its beginning and end were recorded


class Observer:
    """Observes the iterations of one module between :meth:`attach` and :meth:`detach`.

    An iteration begins with :meth:`begin`, just before the forward pass, and ends with the next
    one, or with :meth:`end`. Iterations that begin while ``detail`` is set record every backward
    operation, which takes a few microseconds each; others only gradients and submodules. While
    ``quiet`` is set, they record only their beginning and end: the difference is the cost of
    recording. When this object is freed, its hooks are removed.
    """

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, nn.Parameter], clock: Clock
    ) -> None:
        self._module = module
        self._parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self._identities = {id(parameter) for parameter in self._parameters.values()}
        self._clock = clock
        self._gradients = GradientHooks()
        self._handles: list[RemovableHandle] = []
        self._node_handles: list[RemovableHandle] = []
        """Of this iteration only: a node may run again in a later one."""
        self._events: list[ObservedEvent] = []
        self._graph: AutogradGraph | None = None
        self._sequence_at: list[int] = []
        self._noting = False
        self._in_forward = False
        self.detail = False
        self.quiet = False
        self._was_quiet = False
        self._ended: Any = None
        for handles in (self._handles, self._node_handles):
            weakref.finalize(self, take_off, handles).atexit = False

    def attach(self) -> None:
        """Register the hooks."""
        self._visit("", self._module, set())
        ready = weakly(self._gradient_ready)
        for name, parameter in self._parameters.items():
            self._gradients.add(parameter, after=partial(ready, name))
        before_steps.add(self._note_step, Moment.STEP)
        after_steps.add(self._note_step, Moment.STEPPED)
        after_gathers.add(self._note_step, Moment.GATHERED)

    def _visit(self, name: str, module: nn.Module, seen: set[nn.Module]) -> None:
        """Hook a module and its submodules, but nothing inside compiled modules."""
        if module in seen or isinstance(module, torch.jit.ScriptModule):  # which take no hooks
            return
        seen.add(module)
        compiled = is_compiled(module)
        is_leaf = compiled or next(module.children(), None) is None
        computes = is_leaf or next(module.parameters(recurse=False), None) is not None
        # Hooks of a module that is compiled in place are compiled with it.
        if name and computes and compiled_call(module) is None:
            reached = weakly(self._module_reached)
            enter = _RecordingHook(partial(reached, Moment.ENTER, name))
            leave = _RecordingHook(partial(reached, Moment.EXIT, name))
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave))
        if not compiled:
            for child_name, child in module.named_children():
                self._visit(f"{name}.{child_name}" if name else child_name, child, seen)

    def detach(self) -> None:
        """Remove every hook and all records."""
        for steps in (before_steps, after_steps, after_gathers):
            steps.remove(self._note_step)
        self._gradients.remove()
        take_off(self._handles)
        take_off(self._node_handles)
        self._noting = False
        self._events = []
        self._graph = None

    def begin(self) -> ObservedIteration | None:
        """Begin an iteration and return the one before, if it was observed."""
        stamp = self._clock.stamp()
        finished = self.unfinished(stamp if self._ended is None else self._ended)
        self._ended = None
        take_off(self._node_handles)
        self._events = [ObservedEvent(Moment.FORWARD, "", stamp)]
        self._graph = None
        self._sequence_at = [sequence_number()] if self.detail else []
        self._was_quiet = self.quiet
        self._noting = not self.quiet
        self._in_forward = True
        return finished

    def unfinished(self, end_stamp: Any) -> ObservedIteration | None:
        """Return what was observed of the iteration that runs, up to now; None if none runs."""
        if not self._events:
            return None
        return ObservedIteration(
            self._events, end_stamp, self._graph, self._sequence_at, self._was_quiet
        )

    def output(self, output: Any) -> None:
        """Record the end of the model's forward and, in detail, read its graph."""
        if not self._noting:
            return
        self._note(Moment.OUTPUT, "")
        self._in_forward = False
        if self.detail:
            self._graph = read_graph(output)
            reached = weakly(self._node_reached)
            self._node_handles += [
                node.register_prehook(partial(reached, index))
                for index, node in enumerate(self._graph.nodes)
            ]
            self._note(Moment.WALKED, "")

    def accumulate(self) -> None:
        """Stop recording at the end of an iteration's first micro-batch, until :meth:`resume`."""
        if self._noting:
            self._note(Moment.ACCUMULATE, "")
            self._noting = False

    def resume(self) -> None:
        """Go on recording with the forward pass of the last micro-batch."""
        self._noting = not self._was_quiet
        if self._noting:
            self._note(Moment.RESUME, "")

    def end(self) -> None:
        """End the iteration before the next one begins: what follows belongs to neither."""
        self._noting = False
        self._ended = self._clock.stamp()

    def pause(self) -> None:
        """Stop recording until the next :meth:`begin`, for a forward pass outside an iteration.

        The iteration stays open; the rest of its time counts as between iterations.
        """
        self._noting = False

    def _note(self, moment: Moment, key: str | int) -> None:
        self._events.append(ObservedEvent(moment, key, self._clock.stamp()))
        if self.detail and self._in_forward:
            self._sequence_at.append(sequence_number())

    def _module_reached(self, moment: Moment, name: str) -> None:
        # Checkpointed modules run again in backward; only the forward pass counts here.
        if self._noting and self._in_forward:
            self._note(moment, name)

    def _node_reached(self, index: int, _: Any) -> None:
        if self._noting:
            self._note(Moment.NODE, index)

    def _gradient_ready(self, name: str, *_: Any) -> None:
        if self._noting and not self._in_forward:
            self._note(Moment.READY, name)

    def _note_step(self, moment: Moment, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        updated = (id(p) for group in optimizer.param_groups for p in group["params"])
        if self._noting and not self._in_forward and not self._identities.isdisjoint(updated):
            self._note(moment, "")


class _RecordingHook(ModuleHook):
    """Records when a module's forward begins or ends."""

    def __init__(self, record: Callable[[], None]) -> None:
        self._record = record

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():  # not a part of what is compiled
            self._record()


class AutogradGraph(NamedTuple):
    """The nodes that backward will run, except those that accumulate gradients."""

    nodes: list[Node]
    names: list[str]  # class name of each node's function, such as ``"ConvolutionBackward0"``
    sequence: list[int]
    """Autograd's number of each node, which increases in the order of the forward pass."""
    consumers: list[list[int]]  # for each node, the nodes that must run before it in backward


def read_graph(output: Any) -> AutogradGraph:
    """Walk the autograd graph from every tensor in a model's output; the result keeps it alive."""
    roots = dict.fromkeys(t.grad_fn for t in tensors_in(output) if t.grad_fn is not None)
    nodes, stack = list(roots), list(roots)
    index = {root: number for number, root in enumerate(roots)}
    consumers: list[list[int]] = [[] for _ in roots]
    while stack:
        node = stack.pop()
        for before, _ in node.next_functions:
            if before is None or before.name().endswith("AccumulateGrad"):
                continue
            if before not in index:
                index[before] = len(nodes)
                nodes.append(before)
                stack.append(before)
                consumers.append([])
            consumers[index[before]].append(index[node])
    return AutogradGraph(
        nodes=nodes,
        names=[node.name() for node in nodes],
        sequence=[sequence_number_of(node) for node in nodes],
        consumers=consumers,
    )


def sequence_number() -> int:
    """Return the sequence number that autograd gives to the next operation of this thread."""
    with torch.inference_mode(False), torch.enable_grad():
        probe = torch.empty(0, requires_grad=True).view(0).grad_fn
    assert probe is not None
    return sequence_number_of(probe)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nest of mappings, sequences and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
