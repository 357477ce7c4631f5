"""What compression would gain: predicted beside the dense plans, and never chosen."""

from __future__ import annotations

from syncline.model.collective_costs import ALL_REDUCE_ALGORITHMS
from syncline.model.network import Network
from syncline.model.profile import Profile
from syncline.model.sparse_costs import SPARSE_ALGORITHMS
from syncline.model.suggestion import Suggestion
from syncline.planners.merge import Merge
from syncline.simulator.predict import predict_iteration_s

__all__ = ["SUGGESTED_DENSITY", "suggestion"]

SUGGESTED_DENSITY = 0.001
"""At which gTop-k's models converge as without it (gTop-k, section IV.B)."""


def suggestion(
    profile: Profile, network: Network, dense_s: float, *, density: float = SUGGESTED_DENSITY
) -> Suggestion | None:
    """Return the sparse exchange of the shortest iteration, its messages merged for it.

    All-gather (``top-k``) where that is cheaper than gTop-k, as with few workers or on a fast link.

    Args:
        profile: what the worker computes.
        network: what dense messages cost.
        dense_s: seconds an iteration without compression.
        density: share of the elements that each worker sends.

    Returns:
        None where there is nothing to compare: a single worker, a network that is sparse already,
        of which no link is known, or with several workers a host, for which sparse exchange has no
        form; or an iteration that takes no time.
    """
    if dense_s <= 0 or not _can_be_sparse(network):
        return None
    found = {}
    for algorithm in SPARSE_ALGORITHMS:
        sparse = network.with_(algorithm=algorithm, density=density)
        plan = Merge().plan(profile, sparse)
        found[algorithm] = predict_iteration_s(profile, sparse, plan)
    best = min(found, key=lambda name: found[name])
    if found[best] <= 0:
        return None
    return Suggestion(
        algorithm=best,
        density=density,
        iteration_s=found[best],
        dense_s=dense_s,
        selecting_counted=network.sparse is not None,
        on_gpu=profile.device.startswith("cuda"),
    )


def _can_be_sparse(network: Network) -> bool:
    on_one_host = network.hosts is not None and network.hosts != network.workers
    several = network.workers > 1 and not on_one_host
    known = network.link is not None or network.algorithm in ALL_REDUCE_ALGORITHMS
    return several and known and network.density is None
