"""MG-WFBP's rule: as the paper prints it, by hand, and where it loses."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.network import Network
from syncline.plan.planners.merge import Merge
from syncline.plan.planners.mgwfbp import MgWfbp, find_merged_layers
from tests import strategies as some
from tests.plan.planners.instances import finish


def algorithm_1(a: float, b: float, t_b_from_1: list[float], p_from_1: list[int]) -> list[bool]:
    """MG-WFBP, Algorithm 1, line by line, with arrays that begin at 1. O(L^2)."""
    L = len(t_b_from_1)
    t_b, p = [0.0, *t_b_from_1], [0, *p_from_1]

    def calculate_comm_start() -> list[float]:  # line 20
        tau_c = [0.0] * (L + 1)  # line 21
        tau_c[L] = tau_b[L] + t_b[L]  # line 22
        for l in range(L - 1, 0, -1):  # line 23  # noqa: E741 - the paper's name
            tau_c[l] = max(tau_c[l + 1] + t_c[l + 1], tau_b[l] + t_b[l])  # line 24
        return tau_c  # line 25

    t_c = [0.0] * (L + 1)  # line 1
    tau_b = [0.0] * (L + 1)  # line 2
    m = [False] * (L + 1)  # line 3
    for l in range(1, L + 1):  # line 4  # noqa: E741
        t_c[l] = a + b * p[l]  # line 5
    tau_b[L] = 0  # line 6
    for l in range(L - 1, 0, -1):  # line 7  # noqa: E741
        tau_b[l] = tau_b[l + 1] + t_b[l + 1]  # line 8
    tau_c = calculate_comm_start()  # line 9
    for l in range(L, 1, -1):  # line 10  # noqa: E741
        if tau_b[l - 1] + t_b[l - 1] - tau_c[l] < a:  # line 11
            t_c[l] = 0  # lines 12 and 17
            p[l - 1] = p[l - 1] + p[l]  # line 18
            t_c[l - 1] = a + b * p[l - 1]  # line 19
            tau_c = calculate_comm_start()  # line 13
            m[l] = True  # line 14
    return m[1:]  # line 15


times = st.one_of(st.just(0.0), st.integers(0, 20).map(float), st.floats(0, 10))


@some.many
@given(times, times, st.lists(st.tuples(times, st.integers(0, 1000)), min_size=1, max_size=30))
def test_the_rule_is_the_papers(a: float, b: float, layers: list[tuple[float, int]]) -> None:
    t_b, p = [t for t, _ in layers], [size for _, size in layers]
    assert find_merged_layers(a, b, t_b, p) == algorithm_1(a, b, t_b, p)


def last_tensors(a: float, b: float, gaps: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return the cuts for layers in ready order: the paper's layers from L to 1."""
    merged = find_merged_layers(a, b, list(gaps)[::-1], list(sizes)[::-1])
    assert merged == algorithm_1(a, b, list(gaps)[::-1], list(sizes)[::-1])
    return [i for i, is_merged in enumerate(merged[::-1]) if not is_merged]


@pytest.mark.parametrize(
    ("a", "gaps", "sizes", "cuts"),
    [
        # Hidden. Layer 3 is ready at 10, layer 2 at 20, layer 1 at 30; each message takes 3.
        # l = 3: 20 - 10 = 10 >= 1, normal, sent 10 to 13. l = 2: tau_c = 20, 30 - 20 >= 1, normal.
        (1, [10, 10, 10], [2, 2, 2], [0, 1, 2]),
        # A merge saves more than it waits. Layer 3 is ready at 10, layer 2 at 13, layer 1 at 19.
        # l = 3: 13 - 10 = 3 < 5, merged; p[2] = 5, t_c[3] = 0, tau_c[2] = max(10 + 0, 13) = 13.
        # l = 2: 19 - 13 = 6 >= 5, normal.
        (5, [10, 3, 6], [2, 3, 4], [1, 2]),
        # With layer 1 ready at 17: 17 - 13 = 4 < 5, merged as well.
        (5, [10, 3, 4], [2, 3, 4], [2]),
        # A busy channel. Layers 4 to 1 are ready at 10, 16, 17, 18.
        # l = 4: 16 - 10 = 6 >= 5, normal: sent from 10 to 10 + 5 + 20 = 35, so tau_c[3] = 35.
        # l = 3: 17 - 35 < 5, merged, tau_c[2] = max(35 + 0, 17) = 35. l = 2: 18 - 35 < 5, merged.
        (5, [10, 6, 1, 1], [20, 1, 1, 1], [0, 3]),
        # Waiting as long as the latency gains nothing: line 11 is strict, 15 - 10 is not below 5.
        (5, [10, 5], [1, 1], [0, 1]),
    ],
)
def test_by_hand(a: float, gaps: list[float], sizes: list[int], cuts: list[int]) -> None:
    assert last_tensors(a, 1, gaps, sizes) == cuts


def test_by_hand_the_chain_that_is_not_optimal() -> None:
    # a = 10, b = 1; four layers of 30 bytes, ready at 9, 18, 27, 36. Every gap is 9 < 10, and each
    # merge moves tau_c to the next ready time, so all four chain: 36 + 10 + 120 = 166.
    gaps, sizes, ready = [9, 9, 9, 9], [30, 30, 30, 30], [9, 18, 27, 36]
    cuts = last_tensors(10, 1, gaps, sizes)
    assert cuts == [3]
    assert finish(ready, sizes, cuts, lambda m: 10 + m) == 166
    # Sending the first alone takes 9 + 40 = 49, and the rest 49 + 100 = 149.
    assert finish(ready, sizes, [0, 3], lambda m: 10 + m) == 149
    # The same as a profile: 60 bytes at half a nanosecond each.
    profile = some.profile_of([9, 9, 9, 9], [15] * 4)
    network = Network.line(workers=4, a_s=10e-9, b_s_per_byte=0.5e-9)
    assert MgWfbp().last_tensors(profile, network) == [3]
    assert Merge().last_tensors(profile, network) == [0, 3]


class Counted(list[float]):
    reads = 0

    def __getitem__(self, index: int) -> float:  # type: ignore[override]
        Counted.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("layers", [10, 1000, 10_000])
def test_the_rule_reads_every_layer_once(layers: int) -> None:
    """The paper's O(L^2) is O(L) here, whatever is merged."""
    random_ = random.Random(layers)
    for a in (0.0, 0.5, 1e9):
        Counted.reads = 0
        t_b = Counted(random_.random() for _ in range(layers))
        p = Counted(random_.random() for _ in range(layers))
        find_merged_layers(a, 1.0, t_b, p)  # type: ignore[arg-type]
        assert Counted.reads == 2 * layers


def test_a_curve_is_taken_as_the_line_through_its_ends() -> None:
    curve = some.IntegerCurve(((0, 10, 1), (50, 200, 0)))
    # All gradients are 100 bytes: a = 10, b = (200 - 10) / 100 = 1.9.
    profile = some.profile_of([100, 40, 40], [10, 10, 5])
    line = Network.line(workers=4, a_s=10e-9, b_s_per_byte=1.9e-9)
    assert MgWfbp().last_tensors(profile, curve.network()) == MgWfbp().last_tensors(profile, line)
