"""What the command line accepts as a network."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from syncline.errors import FileError, UserError, did_you_mean, quoted, require_known
from syncline.plan.exchange import EXCHANGES, Link, Stage
from syncline.plan.files import read_bytes
from syncline.plan.network import ETHERNET_LATENCY_S, PRESETS, Contention, Network
from syncline.plan.quantities import parse_bandwidth, parse_duration, require_time
from syncline.plan.recipe import SPARSE_DEFAULT, SPARSE_NAMES

INSIDE = Link(alpha_s=5e-6, beta_s_per_byte=1 / 12e9, gamma_s_per_byte=0.0)
"""Link inside a host unless stated: PCIe 3.0 x16, 12 GB/s and 5 us a message."""
WORKERS = 16  # workers where none are given, as in the presets

ALGORITHM_ALIASES = {
    "double-tree": "double-binary-trees",
    "tree": "binary-tree",
    "pipeline": "linear-pipeline",
    "ps": "parameter-server",
    **SPARSE_NAMES,
}
"""Short name -> algorithm; the sparse ones are those of training."""

NETWORK_HELP = (
    "NETWORK is a network file, a preset such as 10gbit, or the rate of a link such as 100mbit; "
    "'syncline help network' lists all forms."
)

STAGES: dict[str, Literal["host", "switch"]] = {"staging": "host", "switch": "switch"}
"""Key that gives the rate of a stage -> where the stage is."""

COMMON_FORM = "[,jobs=N][,contention=FACTOR][,message-cost=TIME]"
LINE_FORM = f"a=SECONDS,b=SECONDS_PER_BYTE[,workers=N][,algorithm=NAME]{COMMON_FORM}"
LINK_FORM = (
    "bandwidth=RATE[,latency=TIME][,workers=N][,algorithm=NAME][,density=SHARE]"
    "[,hosts=HOSTSxWORKERS[,inside-bandwidth=RATE][,inside-latency=TIME]][,servers=N]"
    "[,servers-on=workers]"
    f"[,staging=RATE][,switch=RATE]{COMMON_FORM}"
)
POINTS_FORM = f"points=FILE,workers=N[,algorithm=NAME]{COMMON_FORM}"
BENCHMARK_HEADER = re.compile(r"#\s*size\s+(count\s+type|avg latency\s*\(us\))", re.IGNORECASE)
"""The comment with which nccl-tests and OSU's benchmarks name their columns."""
MOST_POINTS_BYTES = 1 << 20  # the largest file of points that is read


def network_argument(
    text: str, *, workers: int | None = None, algorithm: str | None = None
) -> Network:
    """Return the network that a text describes in one of the forms of ``network.txt``.

    ``workers`` and ``algorithm`` (or its short name) replace the network's own.
    """
    name = None if algorithm is None else algorithm_named(algorithm)
    return _read(text).replace(workers=workers, algorithm=name)


def states_workers(text: str) -> bool:
    """Return whether the text of a network states a worker count; a preset or a file does not."""
    keys = {part.partition("=")[0].strip() for part in text.split(",")}
    return _is_written_out(text) and not keys.isdisjoint(("workers", "hosts"))


def algorithm_named(name: str) -> str:
    """Return the full name of an algorithm, which may be given by its short name."""
    require_known("all-reduce algorithm", name, EXCHANGES, also=ALGORITHM_ALIASES)
    return ALGORITHM_ALIASES.get(name, name)


def density_of(text: str) -> float:
    """Read a density, above 0 and at most 1; raises a ValueError if it is no number."""
    density = float(text)
    if not 0 < density <= 1:  # nan, too
        raise UserError(f"a density must be above 0 and at most 1, found {text}")
    return density


def _is_written_out(text: str) -> bool:
    return "=" in text and not os.path.exists(text)  # noqa: PTH110 - Path.exists may raise


BARE_RATE = re.compile(r"\s*\.?\d[\d.]*([eE][-+]?\d+)?\s*[a-zA-Z]*(/\w*)?\s*(,|$)")
"""The rate of a link, where it stands first and without ``bandwidth=``."""


def _read(text: str) -> Network:
    if text in PRESETS:
        return PRESETS[text]
    if _is_written_out(text):
        if re.search(r"(^|,)\s*points\s*=", text):
            return _points(text)
        is_link = BARE_RATE.match(text) or re.search(r"bandwidth\s*=", text)
        return _link(text) if is_link else _line(text)
    missing = not os.path.exists(text)  # noqa: PTH110
    if missing and BARE_RATE.match(text):
        try:
            return _link(text)
        except UserError as error:
            raise UserError(
                f"network {text!r} is no file, preset ({', '.join(PRESETS)}) or rate: {error}"
            ) from None
    if missing and "/" not in text and not text.endswith(".json"):
        raise UserError(
            f"no network file or preset {text!r}{did_you_mean(text, PRESETS)} "
            f"(presets: {', '.join(PRESETS)})"
        )
    if Path(text).suffix.lower() in (".csv", ".tsv", ".txt"):
        raise UserError(
            f"network {text!r}: a file of points does not say how many workers measured them; "
            f"write 'points={text},workers=N'"
        )
    return Network.load(text)


def _points(text: str) -> Network:
    values = _values(text, POINTS_FORM, {"points": str})
    if "points" not in values or "workers" not in values:
        raise UserError(
            f"network {text!r}: both points= and workers= are needed: a file of points does not "
            "say how many workers measured them"
        )
    path = values["points"]
    points = _columns(path)
    workers, algorithm = values["workers"], values.get("algorithm", "ring")
    try:
        network = Network.from_points(*points, workers=workers, name=text, algorithm=algorithm)
        return _with_common_properties(network, values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _columns(path: str) -> tuple[list[int], list[float]]:
    """Return the bytes and seconds of a file of two columns, with commas or spaces between.

    A first line of words is a header. Its second word must name seconds: a column of microseconds
    would be off by a million. Text after a ``#`` is ignored.

    The output of nccl-tests (out-of-place times) and of OSU's benchmarks is read as well. A comment
    names its columns, whose times are microseconds; lines of a launcher before it are ignored.
    """
    try:
        lines = read_bytes(path, most_bytes=MOST_POINTS_BYTES).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not text ({error}); expected two columns of numbers") from None
    sizes_bytes: list[int] = []
    times_s: list[float] = []
    headed = False
    printed = next((i for i, line in enumerate(lines) if BENCHMARK_HEADER.match(line)), None)
    if printed is not None:
        names = lines[printed].strip("# \t").lower().split()
        column = names.index("time") if "time" in names else 1
        lines = [line for line in lines[printed + 1 :] if re.match(r"\s*(#|\d+\s+[\d.])", line)]
    for number, line in enumerate(lines, 1):
        words = re.split(r"\s*[,;]\s*|\s+", line.partition("#")[0].strip())
        if words == [""]:
            continue
        where = f"{path}, line {number}"
        if printed is not None:
            where = f"{path}, row {number}"
            if len(words) <= column:
                raise FileError(f"{where}: expected a time in column {column + 1}: {quoted(line)}")
            if words[0] == "0":
                continue  # nccl-tests and OSU begin with an empty message
            words = [words[0], f"{words[column]}us"]
        if len(words) != 2:
            raise FileError(
                f"{where}: expected a size in bytes and a time in seconds, found {quoted(line)}"
            )
        size, seconds = words
        if not headed and not sizes_bytes and not re.match(r"[-+.\d]", size):
            headed = True
            if not re.search(r"(?<![a-z])s(ec(onds)?)?\W*$", seconds.lower()):
                raise FileError(
                    f"{where}: expected a header such as 'size_bytes,time_s', found "
                    f"{quoted(line)}; give times in seconds, or with their unit, as in 44.2us"
                )
            continue
        if not re.fullmatch(r"\d{1,19}", size):
            raise FileError(f"{where}: expected a whole number of bytes, found {quoted(size)}")
        try:
            time_s = _number(seconds)
        except ValueError:
            try:
                time_s = parse_duration(seconds)
            except UserError as error:
                raise FileError(f"{where}: {error}, or as a number of seconds") from None
        if not (math.isfinite(time_s) and time_s > 0):
            raise FileError(f"{where}: expected a time above 0 s, found {quoted(seconds)}")
        require_time(f"{where}: the time", time_s)
        sizes_bytes.append(int(size))
        times_s.append(time_s)
    return sizes_bytes, times_s


def _with_common_properties(network: Network, values: dict[str, Any]) -> Network:
    """Return the network with the jobs and contention that were given."""
    factor, per_message_s = values.get("contention", 1.0), values.get("message-cost", 0.0)
    given = Contention(computing=factor, exchange=factor, per_message_s=per_message_s)
    jobs = values.get("jobs", network.jobs)
    return msgspec.structs.replace(network, jobs=jobs, contention=given)


def _line(text: str) -> Network:
    values = _values(text, LINE_FORM, {"a": _number, "b": _number})
    if "a" not in values or "b" not in values:
        raise UserError(f"network {text!r}: both a= and b= are needed")
    line = Network.line(
        workers=values.get("workers", WORKERS),
        a_s=values["a"],
        b_s_per_byte=values["b"],
        name=text,
        algorithm=values.get("algorithm", "ring"),
    )
    return _with_common_properties(line, values)


def _link(text: str) -> Network:
    values = _values(
        f"bandwidth={text}" if BARE_RATE.match(text) else text,
        LINK_FORM,
        {
            "bandwidth": parse_bandwidth,
            "latency": parse_duration,
            "density": density_of,
            "hosts": _topology,
            "inside-bandwidth": parse_bandwidth,
            "inside-latency": parse_duration,
            "servers": _count,
            "servers-on": _is_colocated,
            "staging": parse_bandwidth,
            "switch": parse_bandwidth,
        },
    )
    if "bandwidth" not in values:
        raise UserError(f"network {text!r}: bandwidth= is needed, such as bandwidth=10gbit")
    link = Link(
        alpha_s=values.get("latency", ETHERNET_LATENCY_S),
        beta_s_per_byte=1 / values["bandwidth"],
        gamma_s_per_byte=0.0,
    )
    density = values.get("density")
    hosts, workers, inside = _hosts(text, values)
    stages = (Stage(at=at, bytes_per_s=values[k]) for k, at in STAGES.items() if k in values)
    network = Network.of_link(
        link,
        workers=workers,
        algorithm=values.get("algorithm", "ring" if density is None else SPARSE_DEFAULT),
        density=density,
        hosts=hosts,
        inside=inside,
        servers=values.get("servers"),
        colocated=values.get("servers-on", False),
        stages=tuple(stages),
        name=text,
    )
    return _with_common_properties(network, values)


def _hosts(text: str, values: dict[str, Any]) -> tuple[int | None, int, Link | None]:
    """Return how many hosts and workers there are, and the link inside a host."""
    if "hosts" not in values:
        for key in ("inside-bandwidth", "inside-latency"):
            if key in values:
                raise UserError(f"network {text!r}: {key}= needs hosts=, such as hosts=4x8")
        return None, values.get("workers", WORKERS), None
    hosts, workers_a_host = values["hosts"]
    most = hosts * workers_a_host
    workers = values.get("workers", most)
    if not most - workers_a_host < workers <= most:
        raise UserError(
            f"network {text!r}: {hosts} hosts of at most {workers_a_host} are {most} workers or a "
            f"few less; found workers={workers}"
        )
    rate, latency_s = values.get("inside-bandwidth"), values.get("inside-latency")
    return hosts, workers, INSIDE.replace(bandwidth_bytes_per_s=rate, latency_s=latency_s)


def _values(text: str, form: str, readers: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Read ``key=value`` pairs, each key at most once; ``form`` is what errors say is expected.

    ``readers`` maps a key to what reads its value; the keys of every network are added.
    """
    readers = readers | {
        "workers": _count,
        "algorithm": algorithm_named,
        "jobs": _count,
        "contention": _number,
        "message-cost": parse_duration,
    }
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        try:
            if not equals or key not in readers or key in values:
                raise ValueError
            values[key] = readers[key](value)
        except UserError:
            raise
        except ValueError:
            raise UserError(f"network {text!r}: expected '{form}', cannot read {part!r}") from None
    return values


def _topology(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text)
    if match is None or not (int(match[1]) and int(match[2])):
        raise ValueError
    return int(match[1]), int(match[2])


def _number(text: str) -> float:
    if not re.fullmatch(r"[-+.\deE]+", text):
        raise ValueError
    return float(text)


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,12}", text):
        raise ValueError
    return int(text)


def _is_colocated(text: str) -> bool:
    if text not in ("own", "workers"):
        raise ValueError
    return text == "workers"
