"""All-reduce over hosts of several workers: inside a host, between hosts, inside again."""

from __future__ import annotations

from syncline.errors import UserError, did_you_mean, quoted
from syncline.model.collective_costs import ALL_REDUCE_ALGORITHMS, all_reduce_line
from syncline.model.cost import CostCurve
from syncline.model.link import Link
from syncline.model.pipeline_costs import pipeline_all_reduce
from syncline.model.rooted_costs import BROADCAST_ALGORITHMS, REDUCE_ALGORITHMS

__all__ = ["DENSE_ALGORITHMS", "all_reduce_curve", "hierarchical_all_reduce"]

DENSE_ALGORITHMS = (*ALL_REDUCE_ALGORITHMS, "linear-pipeline")
"""All-reduces of whole messages between equal workers."""


def all_reduce_curve(algorithm: str, workers: int, link: Link) -> CostCurve:
    """Return the cost of an all-reduce over a link.

    Args:
        algorithm: one of :data:`DENSE_ALGORITHMS`; the linear pipeline cuts each message into as
            many blocks as cost least.
        workers: how many take part; one costs nothing.
        link: what one message between two of them costs.

    Raises:
        UserError: the algorithm is unknown, or there is no worker.
    """
    if algorithm not in DENSE_ALGORITHMS:
        hint = did_you_mean(algorithm, DENSE_ALGORITHMS)
        known = ", ".join(DENSE_ALGORITHMS)
        raise UserError(f"unknown all-reduce algorithm {quoted(algorithm)}{hint} (known: {known})")
    if algorithm == "linear-pipeline":
        return pipeline_all_reduce(
            workers, link.alpha_s, link.beta_s_per_byte, link.gamma_s_per_byte
        )
    return all_reduce_line(
        algorithm,
        workers=workers,
        alpha_s=link.alpha_s,
        beta_s_per_byte=link.beta_s_per_byte,
        gamma_s_per_byte=link.gamma_s_per_byte,
    )


def hierarchical_all_reduce(
    *,
    hosts: int,
    workers_a_host: int,
    inside: Link,
    between: Link,
    algorithm: str = "ring",
    scheme: str = "reduce-scatter",
) -> CostCurve:
    """Return the cost of an all-reduce in three stages, one after another.

    ``"reduce-scatter"``: the L workers of a host reduce-scatter round a ring; worker i of each host
    all-reduces its ``M / L`` bytes with worker i of the others; an all-gather inside the host. The
    L all-reduces share the host's link, so together they load it as one of M bytes would; their
    startups overlap, and each worker adds only its own part.

    ``"reduce"``: a binomial tree reduces to one worker a host, those all-reduce M bytes, and a tree
    broadcasts inside the host.

    With one worker a host this is the flat all-reduce between hosts. With one host it is the flat
    ring, or for ``"reduce"`` the flat binary tree, inside.

    Args:
        hosts: H, at least 1.
        workers_a_host: L, at least 1.
        inside: link between two workers of a host.
        between: link between two hosts, shared by the workers of a host.
        algorithm: the all-reduce between hosts; one of :data:`DENSE_ALGORITHMS`.
        scheme: ``"reduce-scatter"`` or ``"reduce"``.

    Raises:
        UserError: a count is below 1, or the algorithm or the scheme is unknown.
    """
    if workers_a_host < 1:
        raise UserError(f"a host needs at least 1 worker, found {workers_a_host}")
    if scheme == "reduce-scatter":
        local = all_reduce_curve("ring", workers_a_host, inside)
        gamma = between.gamma_s_per_byte / workers_a_host
    elif scheme == "reduce":
        local = _reduce_and_broadcast(workers_a_host, inside)
        gamma = between.gamma_s_per_byte
    else:
        raise UserError(f"unknown scheme {quoted(scheme)} (known: reduce-scatter, reduce)")
    shared = Link(
        alpha_s=between.alpha_s, beta_s_per_byte=between.beta_s_per_byte, gamma_s_per_byte=gamma
    )
    return CostCurve.in_turn((local, all_reduce_curve(algorithm, hosts, shared)))


def _reduce_and_broadcast(workers: int, link: Link) -> CostCurve:
    """Return the cost of a tree reduce to one worker and a tree broadcast from it."""
    tree = "minimum-spanning-tree"
    numbers = (workers, link.alpha_s, link.beta_s_per_byte, link.gamma_s_per_byte)
    stages = (REDUCE_ALGORITHMS[tree](*numbers), BROADCAST_ALGORITHMS[tree](*numbers))
    return CostCurve.in_turn(CostCurve.line(*stage) for stage in stages)
