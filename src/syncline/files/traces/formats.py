"""The trace formats: how each is recognised, read and written.

A file's format is recognised by its first bytes, not by its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from syncline.errors import FileError, UserError, require_known
from syncline.files.traces.astrasim import (
    DEFAULT_CLOCK_HZ,
    is_astrasim,
    read_astrasim,
    write_astrasim,
)
from syncline.files.traces.chakra import read_chakra, write_chakra
from syncline.files.traces.chakra_nodes import is_metadata
from syncline.files.traces.chrome import to_chrome_trace
from syncline.files.traces.execution_trace import ExecutionTrace, read_execution_trace
from syncline.files.traces.kineto import read_kineto
from syncline.files.traces.layer_table import is_layer_table, read_layer_table, write_layer_table
from syncline.files.traces.pipedream import is_pipedream, read_pipedream
from syncline.files.traces.reading import ReadProgress, in_file, open_trace
from syncline.files.traces.sizes import read_sizes
from syncline.files.traces.trace import Trace, Written
from syncline.plan.document import read_document
from syncline.plan.network import Network
from syncline.plan.profile import Profile
from syncline.plan.timeline import Timeline

HEAD_BYTES = 1 << 16
KINETO = "kineto"
EXECUTION_TRACE = "execution-trace"
Paths = Sequence[str | os.PathLike[str]]


class TraceOptions(NamedTuple):
    """Options of some formats, and the progress callback of readers."""

    clock_hz: float = DEFAULT_CLOCK_HZ  # cycles per second, for formats whose times are cycles
    step: int | None = None  # the number of the only ``ProfilerStep`` to read; None for all
    sizes: str | None = None  # file with the sizes of gradients that a profiler trace lacks
    progress: ReadProgress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of trace files."""

    name: str
    summary: str
    detects: Callable[[bytes], bool] | None = None
    """Return whether bytes (at most the first 64 KiB) begin a file of this format."""
    read: Callable[[Paths, TraceOptions], Trace] | None = None
    write: Callable[[Trace, Network | None, TraceOptions], Written] | None = None


def detect(path: str | os.PathLike[str]) -> Format:
    """Return the format of a file."""
    source = str(path)
    with open_trace(path) as stream:
        head = stream.read(HEAD_BYTES)
    for form in FORMATS.values():
        if form.detects is not None and form.detects(head):
            return form
    for begins, at, kind in ((b"ustar", 257, "tar"), (b"PK\x03\x04", 0, "zip")):
        if head[at : at + len(begins)] == begins:
            raise FileError(
                f"{source}: this is a {kind} archive; unpack it and name the trace file in it"
            )
    known = ", ".join(form.name for form in FORMATS.values() if form.read is not None)
    raise FileError(
        f"{source}: not a trace of a known format, it begins with {head[:16]!r} (known: {known}); "
        "if it is one of these, say so with --from"
    )


def format_named(name: str) -> Format:
    """Return the format of that name."""
    require_known("trace format", name, FORMATS)
    return FORMATS[name]


def read_trace(
    paths: Paths, form: Format | None = None, options: TraceOptions | None = None
) -> tuple[Format, Trace]:
    """Read one trace, of the given format or the one recognised; return its format too.

    ``paths`` names one file, or the profiler traces of a job, one for each rank. With those it may
    also name the job's execution traces: one in all, or one for each rank.
    """
    if not paths:
        raise UserError("no trace file was named")
    options = options or TraceOptions()
    found = [form or detect(path) for path in paths]
    chosen = found[0]
    if {one.name for one in found} == {KINETO, EXECUTION_TRACE}:
        structure = [p for p, f in zip(paths, found, strict=True) if f.name == EXECUTION_TRACE]
        joined = [read_execution_trace(path, progress=options.progress) for path in structure]
        profiled = [path for path in paths if path not in structure]
        return FORMATS[KINETO], _read_kineto(profiled, options, joined)
    for other, path in zip(found, paths, strict=True):
        if other is not chosen:
            raise UserError(
                f"{paths[0]} is of format {chosen.name}, {path} of format {other.name}; name only "
                "files that belong together"
            )
    if chosen.read is None:
        raise UserError(f"{chosen.name} traces are written only, not read")
    if chosen.name != KINETO:
        trace = f"a trace of format {chosen.name}"
        if len(paths) > 1:
            raise UserError(f"{trace} is one file, found {len(paths)}; name them one by one")
        if options.sizes is not None:
            raise UserError(f"{paths[0]}: {trace} holds its sizes; leave out the file of sizes")
        if options.step is not None:
            raise UserError(f"{paths[0]}: {trace} has no steps to choose from; leave out the step")
    return chosen, chosen.read(paths, options)


def write_trace(
    trace: Trace, form: Format, network: Network | None = None, options: TraceOptions | None = None
) -> Written:
    """Return the content of a file of that format; the network gives what messages cost."""
    if form.write is None:
        raise UserError(f"{form.name} traces are read only, not written")
    return form.write(trace, network, options or TraceOptions())


def _begins_text(test: Callable[[str], bool]) -> Callable[[bytes], bool]:
    return lambda head: test(head.decode("utf-8", "replace")) if b"\0" not in head else False


_SCHEMA = re.compile(rb'"schema"\s*:\s*"1\.')
_KINETO_KEYS = (b'"traceEvents"', b'"deviceProperties"', b'"schemaVersion"')


def _is_kineto(head: bytes) -> bool:
    if _begins_json(head, b"["):
        return b'"ph"' in head
    return _begins_json(head, b"{") and any(key in head for key in _KINETO_KEYS)


def _begins_json(head: bytes, bracket: bytes) -> bool:
    return head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(bracket)


def _read_ours(path: str | os.PathLike[str]) -> Trace:
    document = read_document(path, (Profile, Timeline))
    if isinstance(document, Timeline):
        return Trace(model=document.name, profile=None, timeline=document)
    assert isinstance(document, Profile)
    return Trace(model=document.model, profile=document, steps=document.iterations)


def _read_execution_trace(paths: Paths, options: TraceOptions) -> Trace:
    with in_file(paths[0]):
        return read_execution_trace(paths[0], progress=options.progress).trace()


def _read_kineto(
    paths: Paths, options: TraceOptions, joined: Sequence[ExecutionTrace] = ()
) -> Trace:
    found = read_kineto(
        paths,
        step=options.step,
        execution_traces=joined,
        sizes=None if options.sizes is None else read_sizes(options.sizes),
        progress=options.progress,
    )
    with in_file(paths[0]):
        return found.trace()


def _write_chrome(trace: Trace) -> Written:
    if trace.timeline is None:
        raise UserError(
            f"{trace.model}: the trace says what operations cost, not when they ran; predict a "
            "timeline of its profile with 'syncline simulate --timeline', and convert that"
        )
    text = to_chrome_trace([trace.timeline], profile=trace.profile, plan=trace.plan)
    return Written(text.encode())


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format(
            name="layer-table",
            summary="the papers' layer-wise table (dag-model, Table VI): microseconds, bytes",
            detects=_begins_text(is_layer_table),
            read=lambda paths, options: read_layer_table(paths[0], progress=options.progress),
            write=lambda trace, network, _: write_layer_table(trace.known_profile(), network),
        ),
        Format(
            name="astrasim",
            summary="ASTRA-sim's text workload, data-parallel: cycles, bytes",
            detects=_begins_text(is_astrasim),
            read=lambda paths, options: read_astrasim(
                paths[0], clock_hz=options.clock_hz, progress=options.progress
            ),
            write=lambda trace, _, options: write_astrasim(
                trace.known_profile(), clock_hz=options.clock_hz
            ),
        ),
        Format(
            name="pipedream",
            summary="PipeDream's operator graph: milliseconds, bytes",
            detects=_begins_text(is_pipedream),
            read=lambda paths, options: read_pipedream(paths[0], progress=options.progress),
        ),
        Format(
            name="json",
            summary="our own profile or timeline: seconds",
            detects=lambda head: head.lstrip()[:1] == b"{" and b'"syncline/' in head[:256],
            read=lambda paths, _: _read_ours(paths[0]),
            write=lambda trace, *_: Written(trace.known_profile().to_json().encode()),
        ),
        Format(
            name=EXECUTION_TRACE,
            summary="PyTorch execution trace: structure and bytes, no times",
            detects=lambda head: _begins_json(head, b"{") and bool(_SCHEMA.search(head)),
            read=_read_execution_trace,
        ),
        Format(
            name=KINETO,
            summary="PyTorch profiler traces (Kineto) of one rank or several: microseconds",
            detects=_is_kineto,
            read=_read_kineto,
        ),
        Format(
            name="chrome",
            summary="a timeline for Perfetto and chrome://tracing: microseconds",
            write=lambda trace, *_: _write_chrome(trace),
        ),
        Format(
            name="chakra",
            summary="MLCommons Chakra execution trace (.et): microseconds, bytes",
            detects=is_metadata,
            read=lambda paths, options: read_chakra(paths[0], progress=options.progress),
            write=lambda trace, network, _: write_chakra(trace.known_profile(), network),
        ),
    )
}
"""In the order in which they are tried: formats with an unambiguous header first."""
