"""Runs commands on mutated files, each input in time and memory that are bounded.

A command may succeed, or refuse the file with one line and exit code 2. Anything else is a finding:
a traceback, another exit code, an error of several lines or thousands of characters, characters
that steer a terminal, more than 10 s or more than 2 GB.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import select
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

from syncline.cli import main
from syncline.errors import InternalError, SynclineError, UserError
from tests.fuzzing.files import Kind
from tests.fuzzing.mutations import mutated

DEADLINE_S = 10.0
MEMORY_BYTES = 2 << 30
LONGEST_ERROR = 2000  # characters of a message; paths of files are part of it
BATCH = 500  # inputs of one process, so that none meets what many before it left behind
MOST_CRASHES = 3
"""Processes of one kind that may hang or crash before its other inputs are left out."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that a command did not take as it should."""

    number: int
    command: str
    text: str
    content: bytes


@dataclass(slots=True)
class Outcome:
    """What came of the inputs of one kind."""

    inputs: int = 0
    done: Counter[str] = field(default_factory=Counter)  # by command: how often it succeeded
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


class _Deadline(BaseException):
    """The time is over; no ``except Exception`` may swallow it."""


def fuzz(
    kind: Kind,
    *,
    inputs: int,
    seed: int,
    folder: Path,
    deadline_s: float = DEADLINE_S,
    memory_bytes: int = MEMORY_BYTES,
) -> Outcome:
    """Run the commands of a kind on mutated files, in processes forked from this one.

    Args:
        kind: of the files.
        inputs: how many; the first are the valid files themselves.
        seed: an input is a function of it, the kind and the number.
        folder: for the files.
        deadline_s: the most time of a processor that a command may take.
        memory_bytes: the most memory that a command may take.
    """
    # Here, where neither time nor memory is limited.
    importlib.import_module("syncline.lab.training.launch")
    seeds = kind.seeds()
    outcome = Outcome()

    def found(number: int, command: str, text: str) -> None:
        content = content_of(kind, seeds, seed, number)
        outcome.findings.append(Finding(number, command, text, content))

    crashes = 0
    while outcome.inputs < inputs and crashes < MOST_CRASHES:
        stop = min(outcome.inputs + BATCH, inputs)

        def run(
            write: Callable[[Any], None], first: int = outcome.inputs, stop: int = stop
        ) -> None:
            _limit_memory(memory_bytes)
            for number in range(first, stop):
                content = content_of(kind, seeds, seed, number)
                write([number, *_try(kind, content, number, folder, deadline_s)])

        for answer in _forked(run, silence_s=20 * deadline_s):
            if isinstance(answer, str):  # the last: how the process ended
                found(outcome.inputs, "all", f"the process {answer}")
                outcome.inputs += 1
                crashes += 1
                continue
            number, done, refused, findings = answer
            outcome.inputs = number + 1
            outcome.done.update(done)
            outcome.refused.update(refused)
            for command, text in findings:
                found(number, command, text)
    return outcome


def content_of(kind: Kind, seeds: list[bytes], seed: int, number: int) -> bytes:
    """Return the content of an input."""
    if number < len(seeds):
        return seeds[number]
    return mutated(seeds, f"{seed}:{kind.name}:{number}")


def _limit_memory(memory_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _forked(run: Callable[[Callable[[Any], None]], None], *, silence_s: float) -> Iterator[Any]:
    """Yield what a forked process writes, and how it ended if that was not well."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            with os.fdopen(write, "w") as pipe:
                run(lambda answer: print(json.dumps(answer), file=pipe, flush=True))
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    os.close(write)
    silent = False
    with os.fdopen(read, "rb", buffering=0) as pipe:
        rest = b""
        while True:
            # What no exception can end, in native code, is ended from here.
            if not select.select([pipe], [], [], silence_s)[0]:
                silent = True
                os.kill(process, signal.SIGKILL)
                break
            part = pipe.read(1 << 16)
            if not part:
                break
            *lines, rest = (rest + part).split(b"\n")
            yield from map(json.loads, lines)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if silent:
        yield f"gave no sign of life for {silence_s:g} s"
    elif code:
        yield f"ended with {code}"


def _try(
    kind: Kind, content: bytes, number: int, folder: Path, deadline_s: float
) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Return the commands that succeeded, those that refused the input, and what was found."""
    file, out = folder / "in" / kind.file, folder / "out"
    file.parent.mkdir(parents=True, exist_ok=True)
    out.mkdir(exist_ok=True)
    file.write_bytes(content)
    done, refused, found = [], [], []
    for name, command in kind.commands(file, out, number):
        try:
            problem = _problem_of(name, command, file, folder / "in", deadline_s)
        except (Exception, _Deadline):
            problem = traceback.format_exc()
        if problem is None:
            done.append(name)
        elif problem == "":
            refused.append(name)
        else:
            found.append((name, problem))
    return done, refused, found


def _problem_of(
    name: str, command: Sequence[str] | Callable[[], None], file: Path, cache: Path, within_s: float
) -> str | None:
    """Run a command; return None if it succeeded, "" if it refused the file, else the problem."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(cache)}),
        mock.patch("syncline.cli.replay.run_replay", _not_run),
        mock.patch("syncline.lab.training.launch.launch", _not_run),
        _deadline(within_s),
    ):
        try:
            command() if callable(command) else main(list(command))
        except SystemExit as end:
            code = end.code or 0
        except InternalError:
            raise
        except SynclineError as error:
            code = error.exit_code
            print(f"error: {error}", file=err)
    said = err.getvalue()
    problems = {
        f"exit code {code}": code not in (0, 2),
        "more than one line of error": code == 2 and said.count("\n") != 1,
        "no line of error": code == 2 and not said.startswith("error: "),
        "the file is not named": (
            code == 2 and name in ("show", "trace info") and str(file) not in said
        ),
        f"an error of {len(said)} characters": len(said) > LONGEST_ERROR,
        "steers a terminal": "\x1b" in out.getvalue() + said,
    }
    for problem, holds in problems.items():
        if holds:
            return f"{problem}: {said[:LONGEST_ERROR]}"
    return "" if code else None


def _not_run(*_: object, **__: object) -> NoReturn:
    """Stand where workers would be started: all files have been read by then."""
    raise UserError("not run here")


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    def over(number: int, frame: FrameType | None) -> None:
        raise _Deadline(f"not done after {seconds} s")

    # Of the processor, so that other work on the machine makes no findings.
    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
