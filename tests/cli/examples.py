"""What commands are run with, and what a run leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from syncline.plan.network import PRESETS, Link
from tests import strategies as some


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]
Printed = Callable[..., str]

K80 = PRESETS["10gbe-k80"]
LINKED = msgspec.structs.replace(
    PRESETS["10gbe-v100"],
    name="lan",
    link=Link(alpha_s=1e-5, beta_s_per_byte=1e-9, gamma_s_per_byte=0),
)
PROFILE = some.profile_of([1_000_000] * 6, [200_000, 10, 0, 300_000, 5, 60_000])
