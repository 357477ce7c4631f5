"""PyTorch execution traces: the operators of a job and their sizes, without durations.

``torch.profiler.ExecutionTraceObserver`` writes a node for each operator. This file reads the
gradients (``AccumulateGrad``) and the gradient messages, with their sizes. Joined to a profiler
trace of the same job they supply the sizes that it lacks; alone they give a plan but no profile.

Schemas 1.0.x (inputs and attributes as members of a node, or as in 1.1) and 1.1.x are read.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from syncline.errors import MismatchError, UserError, quoted
from syncline.files.traces.kineto_steps import (
    EVALUATE,
    ReadyPoint,
    StepTasks,
    element_dtype,
    message_parts,
)
from syncline.files.traces.reading import ReadProgress, json_elements, open_trace
from syncline.files.traces.trace import Trace
from syncline.plan.plan import Plan, Tensor
from syncline.plan.quantities import LARGEST_BYTES, LARGEST_WORKERS

SCHEMA = re.compile(r"1\.[01]\.\d+(-chakra\.\d+\.\d+\.\d+)?$")
KNOWN = "1.0.x and 1.1.x"
MODEL = "execution trace"
MESSAGE = re.compile(r"c10d::_?(all_?reduce|reduce_?scatter)")
WITHIN_MESSAGE = re.compile(r"record_param_comms$|(nccl|gloo):_?(all_?reduce|reduce_?scatter)")
GROUPS = "## process_group:init ##"
TENSOR_TYPE = re.compile(r"Tensor\(([^()]*(?:<\w+>)?)\)")


class SizedNode(NamedTuple):
    """A gradient that becomes ready, or a message."""

    elements: int | None
    """None for a gradient without a tensor (the loss does not depend on its parameter), and for a
    message that holds no gradients, such as counters."""
    dtype: str | None
    ready: int = 0  # of a message: how many gradients were ready when it was launched


class TracedIteration(NamedTuple):
    """What one training iteration does with gradients, in order."""

    gradients: tuple[SizedNode, ...]
    messages: tuple[SizedNode, ...]

    def exchanges(self) -> tuple[SizedNode, ...]:
        """Return the messages that hold gradients."""
        return tuple(m for m in self.messages if m.elements is not None)


class ExecutionTrace(NamedTuple):
    """The structure of a training job on one rank."""

    source: str
    process: int | None
    workers: int | None
    iterations: tuple[TracedIteration, ...]
    record_ids: dict[int, SizedNode]
    """Every sized node by record function id, as in a profiler trace of the same run."""
    notes: tuple[str, ...]

    def plan(self) -> Plan | None:
        """Return the gradients and messages of the last iteration; None without it or workers."""
        if self.workers is None or not self.iterations:
            return None
        gradients, messages = self.iterations[-1].gradients, self.iterations[-1].exchanges()
        sized = [g.elements for g in gradients]
        sent = [m.elements for m in messages]
        parts = message_parts(sized, sent, [m.ready for m in messages]) if sized and sent else None
        total, known = sum(filter(None, sent)), sum(filter(None, sized))
        if sized and sent and parts is None and (total != known or None in sized):
            raise UserError(
                f"{self.source}: the messages hold {total} elements, the gradients {known}; record "
                "whole training iterations"
            )
        kind, nodes = ("gradient", gradients) if gradients else ("bucket", messages)
        elements = list(itertools.chain.from_iterable(parts)) if parts else sized or sent
        lengths = [sum(filter(None, part)) for part in parts] if parts else sent or [known]
        tensors = tuple(
            Tensor(name=f"{kind} {i}", elements=size, dtype=node.dtype or "float32")
            for i, (size, node) in enumerate(zip(elements, nodes, strict=False))
            if size is not None
        )
        stops = list(itertools.accumulate(filter(None, lengths)))
        return Plan.cut("as traced", MODEL, self.workers, tensors, stops)

    def trace(self) -> Trace:
        """Return the content in the form that all trace readers share, without a profile."""
        steps, plan = len(self.iterations), self.plan()
        return Trace(MODEL, None, workers=self.workers, steps=steps, plan=plan, notes=self.notes)

    def join(self, step: StepTasks) -> StepTasks:
        """Return a step of a profiler trace with the sizes from this trace.

        Operators are matched by record function id, which is the same in both traces if they were
        recorded together. Otherwise they are matched by order, in an iteration that has as many
        gradients and messages, and the same sizes of messages where both traces give them.
        """
        here = (len(step.parameters), len(step.messages))
        by_id = [self.record_ids.get(p.record_id or -1) for p in (*step.parameters, *step.messages)]
        nodes = [node for node in by_id if node is not None]
        ways: list[tuple[Sequence[SizedNode], Sequence[SizedNode], str]] = [
            (nodes[: here[0]], nodes[here[0] :], "by record function id")
        ]
        for whole in self.iterations:
            # A profiler trace without sizes does not tell which messages hold no gradients.
            ways += [(whole.gradients, m, "by order") for m in (whole.exchanges(), whole.messages)]
        for gradients, messages, how in ways:
            if (len(gradients), len(messages)) == here and _agree(step, messages):
                return _with_sizes(step, gradients, messages, how)
        counts = {(len(i.gradients), len(i.messages)) for i in self.iterations}
        have = ", ".join(f"{g} in {m}" for g, m in sorted(counts)) or "none"
        raise MismatchError(
            f"{self.source}: cannot be joined with {step.source}: step {step.number} there has "
            f"{here[0]} gradients in {here[1]} messages, the iterations here have {have} (or "
            "messages of other sizes); give traces that were recorded together"
        )


def _agree(step: StepTasks, messages: Sequence[SizedNode]) -> bool:
    pairs = zip(step.messages, messages, strict=True)
    return all(sent.elements is None or n.elements in (None, sent.elements) for sent, n in pairs)


def _with_sizes(
    step: StepTasks, gradients: Sequence[SizedNode], messages: Sequence[SizedNode], how: str
) -> StepTasks:
    def sized(points: Sequence[ReadyPoint], nodes: Sequence[SizedNode]) -> list[ReadyPoint]:
        return [
            p if n.elements is None else p._replace(elements=n.elements, dtype=n.dtype)
            for p, n in zip(points, nodes, strict=True)
        ]

    # Messages without gradients, such as counters, are dropped.
    exchanged = [node.elements is not None for node in messages]
    return step._replace(
        parameters=sized(step.parameters, gradients),
        messages=list(itertools.compress(sized(step.messages, messages), exchanged)),
        collectives=list(itertools.compress(step.collectives, exchanged)),
        notes=[*step.notes, f"sizes of gradients joined from the execution trace {how}"],
    )


def read_execution_trace(
    path: str | os.PathLike[str], *, progress: ReadProgress | None = None
) -> ExecutionTrace:
    """Read an execution trace, JSON, packed with gzip or not. Linear in the file."""
    reader = _Reader()
    with open_trace(path, progress=progress) as stream:
        for key, place, value in json_elements(stream, ("nodes",)):
            if place is None:
                reader.member(key, value)
            else:
                reader.node(place, value)
        return reader.finish(os.fspath(path))


class _Reader:
    def __init__(self) -> None:
        self._has_schema = False
        self._nodes = 0
        self._found: list[tuple[int, str, SizedNode | None]] = []  # node id, kind, sizes
        self._record_ids: dict[int, SizedNode] = {}
        self._workers: int | None = None
        self._process: int | None = None

    def member(self, key: str, value: Any) -> None:
        if key == "nodes":
            raise _broken("'nodes'", f"expected an array, found {type(value).__name__}")
        if key == "schema":
            if not isinstance(value, str) or not SCHEMA.match(value):
                raise UserError(
                    f"schema {quoted(value)} of execution traces is not known; this release reads "
                    f"{KNOWN}"
                )
            self._has_schema = True
        if key == "pid" and type(value) is int:
            self._process = value

    def node(self, place: int, node: Any) -> None:
        self._nodes += 1
        where = f"nodes[{place}]"
        if not isinstance(node, dict):
            raise _broken(where, f"expected an object, found {type(node).__name__}")
        name = node.get("name")
        if not isinstance(name, str):
            raise _broken(where, f"expected a text in 'name', found {quoted(name)}")
        where = f"{where} {name[:80]!r}"
        if name == GROUPS:
            self._read_groups(node, where)
        elif name.startswith("Optimizer.step#"):
            self._found.append((_id(node, where), "end", None))
        elif name.startswith(EVALUATE):
            self._found.append((_id(node, where), "backward", None))
        elif name.endswith("AccumulateGrad"):
            self._sized("gradient", node, where)
        elif MESSAGE.match(name):
            self._sized("message", node, where)
        elif WITHIN_MESSAGE.match(name):
            self._sized(None, node, where)

    def finish(self, source: str) -> ExecutionTrace:
        """Return what was read, after checking that it is an execution trace."""
        if not self._has_schema:
            raise UserError(f"no 'schema' in it; expected an execution trace of PyTorch ({KNOWN})")
        if not self._nodes:
            raise UserError("no nodes in it; record whole training iterations")
        notes = ["an execution trace holds no durations: it gives gradients and messages only"]
        iterations = self._iterations()
        if not iterations:
            notes.append("no gradients and no messages are in it")
        if self._workers is None:
            notes.append("the trace does not say how many workers there were")
        return ExecutionTrace(
            source=source,
            process=self._process,
            workers=self._workers,
            iterations=tuple(iterations),
            record_ids=self._record_ids,
            notes=tuple(notes),
        )

    def _iterations(self) -> list[TracedIteration]:
        """Return the iterations, each ending with a step of the optimizer."""
        iterations: list[TracedIteration] = []
        gradients: list[SizedNode] = []
        messages: list[SizedNode] = []
        ordered = sorted(self._found, key=lambda found: found[0])
        # Messages before a backward pass hold no gradients; they may, for example, average losses.
        has_backward = any(kind == "backward" for _, kind, _ in ordered)
        begun = not has_backward
        for _, kind, node in [*ordered, (0, "end", None)]:
            if node is not None and kind == "gradient":
                gradients.append(node)
            elif node is not None:
                messages.append(node._replace(ready=len(gradients)))
            elif kind == "backward":
                if not begun:
                    messages = []
                begun = True
            else:
                iteration = TracedIteration(tuple(gradients), tuple(messages))
                if begun and (gradients or iteration.exchanges()):
                    iterations.append(iteration)
                gradients, messages, begun = [], [], not has_backward
        return iterations

    def _sized(self, kind: str | None, node: dict[str, Any], where: str) -> None:
        attributes = _attributes(node)
        self._grow(attributes.get("pg_size"), where)
        identity = _id(node, where)
        elements = 0
        dtypes = set()
        for shape, dtype in _tensors(node):
            if not all(type(n) is int and 0 <= n <= LARGEST_BYTES for n in shape):
                raise _broken(where, "a tensor cannot have such a shape")
            elements += math.prod(shape)
            dtypes.add(element_dtype(dtype))
        if elements > LARGEST_BYTES:
            raise _broken(where, f"a tensor of {elements} elements is not possible")
        known = len(dtypes) == 1 and None not in dtypes
        sized = SizedNode(elements if known else None, dtypes.pop() if known else None)
        record_id = attributes.get("rf_id")
        if type(record_id) is int:
            self._record_ids[record_id] = sized
        if kind is not None:
            self._found.append((identity, kind, sized))

    def _read_groups(self, node: dict[str, Any], where: str) -> None:
        # The sizes of process groups are JSON in the first input.
        inputs = node.get("inputs")
        values = inputs.get("values") if isinstance(inputs, dict) else None
        if not (isinstance(values, list) and values and isinstance(values[0], str)):
            return
        try:
            groups = json.loads(values[0])
        except (ValueError, RecursionError):  # ValueError also for numbers of too many digits
            raise _broken(where, "its process groups are not JSON") from None
        for group in groups if isinstance(groups, list) else ():
            if isinstance(group, dict):
                self._grow(group.get("group_size"), where)

    def _grow(self, workers: Any, where: str) -> None:
        """Take the size of a process group; the largest one is the worker count."""
        if workers is None:
            return
        if type(workers) is not int or not 1 <= workers <= LARGEST_WORKERS:
            raise _broken(where, f"{quoted(workers)} is not a worker count")
        self._workers = max(self._workers or 0, workers)


def _id(node: dict[str, Any], where: str) -> int:
    value = node.get("id")
    if type(value) is not int:
        raise _broken(where, f"expected a whole number in 'id', found {quoted(value)}")
    return value


def _broken(where: str, what: str) -> UserError:
    return UserError(f"{where}: {what}; record the execution trace again")


def _attributes(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node's attributes: a list of named values from 1.0.2 on, earlier its members."""
    listed = node.get("attrs")
    if not isinstance(listed, list):
        return node
    return {
        item["name"]: item.get("value")
        for item in listed
        if isinstance(item, dict) and isinstance(item.get("name"), str)
    }


def _tensors(node: dict[str, Any]) -> list[tuple[list[Any], str]]:
    """Return shape and element type of each input that is a tensor or a list of tensors."""
    inputs = node.get("inputs")
    if isinstance(inputs, dict):
        shapes, types = inputs.get("shapes"), inputs.get("types")
    else:
        shapes, types = node.get("input_shapes"), node.get("input_types")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return []
    found: list[tuple[list[Any], str]] = []
    for shape, text in zip(shapes, types, strict=False):
        if not isinstance(text, str) or not isinstance(shape, list):
            continue
        names = TENSOR_TYPE.findall(text)
        if text.startswith("GenericList["):
            found += [(s, n) for s, n in zip(shape, names, strict=False) if isinstance(s, list)]
        elif names:
            found.append((shape, names[0]))
    return found
