"""``python -m syncline.comm.backend.flight_analysis PREFIX``: torch's analyser on our dumps."""

from __future__ import annotations

import argparse
import glob
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig

from syncline.comm.backend.flight_recorder import FORMAT_VERSION, default_prefix
from syncline.errors import FileError, UserError, printable, quoted, shortened
from syncline.plan.document import LARGEST_FILE_BYTES
from syncline.plan.files import read_bytes, unique_members

Dump = dict[str, Any]


def load(prefix: str) -> dict[str, Dump]:
    """Return a job's dumps by file; raise UserError if there are none, FileError if one is bad."""
    dumps = {}
    for path in sorted(glob.glob(f"{glob.escape(prefix)}*.json")):  # noqa: PTH207 - no folder
        if not Path(path).is_file():  # reading a pipe would block
            raise FileError(f"{path}: expected a regular file; remove it")
        content = read_bytes(path, most_bytes=LARGEST_FILE_BYTES)
        try:
            dump = _shown(json.loads(content, object_pairs_hook=unique_members))
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path}: {shortened(str(error))}") from None
        if not isinstance(dump, dict) or dump.get("version") != FORMAT_VERSION:
            raise FileError(
                f"{path}: expected a dump of the flight recorder of version {FORMAT_VERSION}"
            )
        dumps[path] = dump
    if not dumps:
        raise UserError(f"no file {prefix}*.json; give the prefix that the ranks were given")
    return dumps


def _shown(value: Any) -> Any:
    """Return a JSON value whose texts cannot steer a terminal: torch's analyser logs them, too."""
    match value:
        case str():
            return printable(value)
        case list():
            return [_shown(each) for each in value]
        case dict():
            return {_shown(name): _shown(each) for name, each in value.items()}
    return value


def unfinished(dumps: Mapping[str, Dump]) -> list[str]:
    """Return a line for each operation that a rank has begun and not completed."""
    return [
        f"rank {dump['rank']}: {entry['profiling_name'].partition(':')[2]} of sizes "
        f"{entry['input_sizes']} in group {quoted(entry['process_group'][0])}, "
        f"{'message' if entry['is_p2p'] else 'collective'} number "
        f"{entry['p2p_seq_id' if entry['is_p2p'] else 'collective_seq_id']}: {entry['state']}"
        for dump in dumps.values()
        for entry in dump["entries"]
        if entry["state"] != "completed"
    ]


def analyse(dumps: Mapping[str, Dump]) -> Any:
    """Return what torch's analyser makes of dumps; it also logs what does not match.

    It gets only the collectives that all ranks of their group still have. Messages are left out,
    because it expects every rank of a group to take part in each.
    """
    first: dict[tuple[str, str], int] = {}
    for dump in dumps.values():
        seen = set()
        for entry in dump["entries"]:
            group = _group_of(dump, entry)
            if not entry["is_p2p"] and group not in seen:
                seen.add(group)
                first[group] = max(first.get(group, 0), entry["collective_seq_id"])
    aligned = {}
    for path, dump in dumps.items():
        entries = [
            {**entry, "record_id": 0}  # so that torch leaves out none: it aligns by these
            for entry in dump["entries"]
            if not entry["is_p2p"] and entry["collective_seq_id"] >= first[_group_of(dump, entry)]
        ]
        aligned[path] = {**dump, "entries": entries}
    return build_db(aligned, JobConfig().parse_args(["--allow-incomplete-ranks"]), FORMAT_VERSION)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what ranks had not completed, and what torch's analyser finds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    usual = default_prefix()
    parser.add_argument(
        "prefix",
        nargs="?" if usual else None,
        default=usual,
        help="prefix of the dumps, as the ranks were given it (default: %(default)s)",
    )
    prefix = parser.parse_args(arguments).prefix
    try:
        dumps = load(prefix)
        try:
            lines = unfinished(dumps)
            print("\n".join(lines) or "every operation that was begun is completed")
            analyse(dumps)
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise FileError(
                f"{prefix}*.json: these are not the dumps of one job: {shortened(repr(error))}"
            ) from None
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


def _group_of(dump: Dump, entry: Dump) -> tuple[str, str]:
    name = entry["process_group"][0]
    return name, dump["pg_config"][name]["ranks"]


if __name__ == "__main__":
    raise SystemExit(main())
