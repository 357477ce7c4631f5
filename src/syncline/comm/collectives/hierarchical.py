"""Hierarchical: sums inside each host first, so that every byte crosses between hosts once."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.comm.collectives import direct, ring
from syncline.comm.collectives.schedule import Schedule, Transfers, in_turn, together
from syncline.errors import UserError


def hierarchical(hosts: Sequence[Sequence[int]]) -> Schedule:
    """Return the all-reduce of ranks that share hosts.

    The vector has W shards, W being the ranks of the smallest host, and each shard has one block
    per host. On every host the first W ranks sum one shard each, reading from all their neighbours.
    Ranks with the same shard then form a ring between the hosts. Last, all ranks read the sums from
    their neighbours. A ring over all ranks would take 2 (W H - 1) latencies for H hosts, not
    2 (H - 1). Raise UserError unless ``hosts`` hold each rank from 0 to P - 1 once.
    """
    ranks = sorted(rank for host in hosts for rank in host)
    if not hosts or not all(hosts) or ranks != list(range(len(ranks))):
        raise UserError(
            f"a hierarchical all-reduce needs every rank from 0 on exactly once, and none of the "
            f"hosts empty; found {[list(host) for host in hosts]}"
        )
    shards = min(len(host) for host in hosts)
    inside = together(*(_to_owners(host, shards, len(hosts)) for host in hosts))
    between = ring.all_reduce(len(hosts))
    owners = ([host[shard] for host in hosts] for shard in range(shards))
    across = together(
        *(between.moved(own, first_block=n * len(hosts)) for n, own in enumerate(owners))
    )
    return Schedule(
        collective="all-reduce",
        algorithm="hierarchical",
        ranks=len(ranks),
        blocks=shards * len(hosts),
        **in_turn(inside, across, inside.backwards(reduces=False)).in_order()._asdict(),
    )


def _to_owners(host: Sequence[int], shards: int, hosts: int) -> Transfers:
    """Return the sums of shards inside a host: :func:`direct.reduce_scatter` to the first ranks."""
    whole = direct.reduce_scatter(len(host))
    return whole.where(whole.block_start < shards).moved(host, stride=hosts)
