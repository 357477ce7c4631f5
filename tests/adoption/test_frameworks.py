"""Frameworks train with their adapters as with DDP, to the last bit, and overlap.

With sharded optimizers the last digits may differ.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.adoption.outcome import TORCHRUN, ended, outcomes

SHARDED = ("sharded", "sharded resumed")
KINDS = {
    "lightning": (
        *("automatic", "automatic resumed", "accumulating", "manual", "averaging", "swa"),
        *("compiled", *SHARDED),
    ),
    "transformers": ("accumulating", "accumulating resumed", "checkpointed", "compiled", *SHARDED),
    "accelerate": ("plain", "saved", "scaled", "compiled", "regional"),
}
WARNINGS = {
    "compiled": "overlap: updates are synchronous: the whole model is compiled, so that",
    "regional": "training with DDP's buckets: a copy was put in the wrapper's place",
}  # of kinds in which no update overlaps: what rank 0 says, once
RUN = ("-m", "syncline.run", "--cache", "none", "--no-check", "--planner", "tictac")
"""Plans by what the first iterations show, so that some steps overlap for sure."""
SYNCHRONOUS_UNDER_RUN = {"compiled"}
"""A copy in the wrapper's place is converted like any other wrapper, when it first trains."""


@pytest.mark.slow
@pytest.mark.parametrize("framework", KINDS)
def test_bits_are_those_of_ddp(framework: str, tmp_path: Path) -> None:
    python, *launcher = TORCHRUN
    script = [python, *RUN, *launcher, "-m", f"tests.adoption.run_{framework}", tmp_path]
    ended([*script, *KINDS[framework]], ACCELERATE_USE_CPU="1", SYNCLINE="0")
    digests = {}
    for kind in KINDS[framework]:
        whole = kind.replace("sharded", KINDS[framework][0])  # what it is for the others
        ours = outcomes(tmp_path / kind / "syncline")
        stock, run = (outcomes(tmp_path / whole / which) for which in ("stock", "run"))
        assert {rank["wrapper"] for rank in stock} == {"torch.nn.parallel.distributed"}, kind
        assert {rank["wrapper"] for rank in ours + run} == {"syncline.train.ddp"}, kind
        exact = stock + run if kind != whole else stock + ours + run
        (digests[kind],) = {rank["digest"] for rank in exact}
        assert len({rank["digest"] for rank in ours}) == 1, kind
        for rank in ours:  # a kernel may round the end of a share otherwise
            assert rank["norm"] == pytest.approx(stock[0]["norm"], rel=1e-6), kind
        assert {rank["overlapped"] > 0 for rank in run} == {kind not in SYNCHRONOUS_UNDER_RUN}, kind
        for rank in ours:
            assert rank["steps"] == stock[0]["steps"], kind
            assert (rank["overlapped"] >= 20) == (kind not in WARNINGS), (kind, rank)
        if kind in WARNINGS:
            (said,) = ours[0]["warned"]
            assert re.match(rf"syncline: (\w+: )?{re.escape(WARNINGS[kind])}", said)
            assert said.endswith("block.compile()")
    if framework == "lightning":
        assert digests["automatic resumed"] != digests["automatic"]
    if framework == "transformers":
        assert digests["accumulating resumed"] == digests["accumulating"]
    if framework == "accelerate":
        assert digests["saved"] == digests["plain"]
