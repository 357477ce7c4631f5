"""The output of many workers as one stream of whole lines."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

LONGEST_LINE_BYTES = 1 << 16  # output without an end of line is passed on in parts of this size
REDRAW_S = 1.0  # how often a line that a worker overwrites, as progress bars do, is passed on
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_red", "bright_cyan", "white")


class Lines:
    """Cuts what one worker writes into lines.

    A carriage return ends a line too. Of lines that overwrite each other, the newest is passed on
    once a second, as a terminal would still show it.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._drawn_at_s = float("-inf")

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """Return the lines that ``data`` completes, without their ends; ``now_s`` is monotonic."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [_last_drawn(line) for line in whole]
        # A carriage return at the very end may be half of an end of line.
        drawn, _, newest = rest.removesuffix(b"\r").rpartition(b"\r")
        if drawn and now_s - self._drawn_at_s >= REDRAW_S:
            lines.append(_last_drawn(drawn))
            self._drawn_at_s = now_s
        rest = newest + b"\r" * rest.endswith(b"\r")
        while len(rest) > LONGEST_LINE_BYTES:
            lines.append(rest[:LONGEST_LINE_BYTES])
            rest = rest[LONGEST_LINE_BYTES:]
        self._rest = rest
        return lines

    def finish(self) -> list[bytes]:
        """Return the output that has no end of line yet."""
        rest, self._rest = self._rest, b""
        return [_last_drawn(rest)] if rest else []


def _last_drawn(line: bytes) -> bytes:
    """Return what a terminal shows of a line in which the cursor went back to the beginning."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Printer:
    """Writes each line after the name of its worker, to the stream to which the worker wrote it.

    Names and hosts are by rank; each host has a colour. The streams are this process's.
    """

    def __init__(self, names: list[str], hosts: list[int]) -> None:
        self._streams = (sys.stdout.buffer, sys.stderr.buffer)
        width = max(map(len, names))
        self._prefixes = [
            [
                _coloured(console, f"{name:{width}} | ", COLOURS[host % len(COLOURS)])
                for name, host in zip(names, hosts, strict=True)
            ]
            for console in (Console(), Console(stderr=True))
        ]

    def __call__(self, rank: int, error: bool, line: bytes) -> None:
        """Write a worker's line, given without its end; ``error`` says to standard error."""
        stream = self._streams[error]
        stream.write(self._prefixes[error][rank] + line + b"\n")
        stream.flush()


def _coloured(console: Console, text: str, colour: str) -> bytes:
    """Return the text as the console shows it: coloured only on a terminal that has colours."""
    with console.capture() as capture:
        console.print(Text(text), style=colour, end="", soft_wrap=True)
    return capture.get().encode()
