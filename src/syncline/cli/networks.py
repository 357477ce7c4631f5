"""What the command line accepts as a network: a file, a preset, or a line."""

from __future__ import annotations

import re
from pathlib import Path

from syncline.errors import UserError, did_you_mean
from syncline.model.network import PRESETS, Network

__all__ = ["NETWORK_HELP", "network_argument"]

NETWORK_HELP = (
    "NETWORK is a network file, a preset (" + ", ".join(PRESETS) + "), or a line such as "
    "'a=9.08e-4,b=7.4e-10,workers=16' (seconds, and seconds a byte, of an all-reduce)."
)


def network_argument(text: str, *, workers: int | None = None, algorithm: str = "ring") -> Network:
    """Return the network that ``text`` names.

    Args:
        text: see :data:`NETWORK_HELP`.
        workers: extrapolate to this many workers.
        algorithm: which all-reduce to extrapolate with.

    Raises:
        UserError: it is none of the three.
        FileError: the file is broken.
    """
    network = _read(text)
    if workers is None or workers == network.workers:
        return network
    return network.with_workers(workers, algorithm=algorithm)


def _read(text: str) -> Network:
    if text in PRESETS:
        return PRESETS[text]
    if "=" in text and not Path(text).exists():
        return _line(text)
    if not Path(text).exists() and "/" not in text and not text.endswith(".json"):
        raise UserError(
            f"no network file or preset {text!r}{did_you_mean(text, PRESETS)} "
            f"(presets: {', '.join(PRESETS)})"
        )
    return Network.load(text)


def _line(text: str) -> Network:
    values: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(a|b|workers)\s*=\s*([-+.\deE]+)\s*", part)
        try:
            if match is None or match[1] in values:
                raise ValueError
            values[match[1]] = float(match[2])
        except ValueError:
            raise UserError(
                f"network {text!r}: expected 'a=SECONDS,b=SECONDS_PER_BYTE[,workers=N]', "
                f"cannot read {part!r}"
            ) from None
    if "a" not in values or "b" not in values:
        raise UserError(f"network {text!r}: both a= and b= are needed")
    workers = values.get("workers", 16.0)
    if not workers.is_integer():
        raise UserError(f"network {text!r}: workers must be a whole number")
    return Network.line(workers=int(workers), a_s=values["a"], b_s_per_byte=values["b"], name=text)
