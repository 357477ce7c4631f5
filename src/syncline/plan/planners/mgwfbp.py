"""MG-WFBP's merge rule, exactly as published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from syncline.plan.network import Network
from syncline.plan.planners.base import MergingPlanner
from syncline.plan.profile import Profile


class MgWfbp(MergingPlanner, frozen=True, kw_only=True):
    """Merge a tensor into the next when that finishes the pair no later.

    Source: MG-WFBP, Algorithm 1, with the latency ``a`` and slope ``b`` of Eq. 10. A measured
    curve that is not a straight line is replaced by the line through its cost at 0 bytes and at the
    size of all gradients. The paper calls the result optimal; it is not (see ``merge``).
    """

    NAME: ClassVar[str] = "mgwfbp"

    def last_tensors(self, profile: Profile, network: Network) -> list[int]:
        """Return the tensors that end a message: the paper's normal layers."""
        a_s, b_s_per_byte = network.all_reduce.linearised(profile.gradient_bytes)
        # The paper numbers layers from the input, 1 to L; gradients become ready from L to 1.
        sizes = [gradient.size_bytes for gradient in reversed(profile.gradients)]
        ready = list(profile.ready_s())
        backward = [later - earlier for earlier, later in zip([0.0, *ready], ready, strict=False)]
        merged = find_merged_layers(a_s, b_s_per_byte, backward[::-1], sizes)
        return [index for index, is_merged in enumerate(reversed(merged)) if not is_merged]


def find_merged_layers(
    a_s: float, b_s_per_byte: float, t_b: Sequence[float], p: Sequence[int]
) -> list[bool]:
    """Return, for each layer from 1 to L, whether it is a merged-gradient layer.

    ``t_b`` is the backward time of each layer in seconds, and ``p`` the bytes of its gradient,
    layer 1 first. A merge of layer l changes only the communication of l and l - 1, so the loop
    carries the start of l - 1 along, in O(L); the pseudocode starts anew, in O(L^2).

    Source: MG-WFBP, Algorithm 1.
    """
    layers = len(t_b)
    merged = [False] * layers
    size_bytes = p[-1]  # p[l], with what was merged into it (line 18)
    ready_s = t_b[-1]  # tau_b[l] + t_b[l] (lines 6 to 8)
    comm_start_s = ready_s  # tau_c[l] (line 22)
    for layer in range(layers - 1, 0, -1):  # lines 10 to 14
        below_ready_s = ready_s + t_b[layer - 1]
        if below_ready_s - comm_start_s < a_s:  # line 11, Eq. 38
            merged[layer] = True
            comm_s = 0.0  # line 17, Eq. 12
            size_bytes += p[layer - 1]  # line 18, Eq. 13
        else:
            comm_s = a_s + b_s_per_byte * size_bytes  # line 5 or 19
            size_bytes = p[layer - 1]
        comm_start_s = max(comm_start_s + comm_s, below_ready_s)  # line 24, Eq. 7 and 14
        ready_s = below_ready_s
    return merged
