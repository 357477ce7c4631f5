"""Double binary trees: two trees, each for half of the blocks, so that no link idles.

Source: Sanders, Speck and Traeff (2009), sections 2 to 4.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.comm.collectives.schedule import Transfers, together


def all_reduce(ranks: int, blocks: int) -> Transfers:
    """Return the all-reduce of ``blocks`` blocks over two binary trees.

    Even blocks go over the first tree, odd ones over the second. A rank with children in one tree
    is a leaf in the other, so in both together it has at most two children. The edges are coloured
    with two colours such that the two edges on which a rank receives differ, and so do the two on
    which it sends. Then in every step each rank sends and receives at most one block. First blocks
    are reduced towards the roots. The broadcast follows as soon as the links are free.
    """
    edges = _timed(*_trees(ranks))
    turn = _broadcast_from(edges, ranks, blocks)
    return together(_up(edges, blocks), _down(edges, blocks, first_step=turn))


def broadcast(ranks: int, blocks: int) -> Transfers:
    """Return the broadcast from rank 0 over two binary trees of the other ranks."""
    return _down(_edges_from_root(ranks), blocks)


def reduce(ranks: int, blocks: int) -> Transfers:
    """Return the reduction to rank 0 over the two trees of :func:`broadcast`."""
    return _up(_edges_from_root(ranks), blocks)


def all_reduce_steps(ranks: int, blocks: int) -> int:
    """Return the steps of :func:`all_reduce`: about 2 B + 4 log2 P."""
    edges = _timed(*_trees(ranks))
    return _broadcast_from(edges, ranks, blocks) + _last(edges, edges.delay, blocks) + 1


def broadcast_steps(ranks: int, blocks: int) -> int:
    """Return the steps of :func:`broadcast`: about B + 2 log2 P."""
    edges = _edges_from_root(ranks)
    return _last(edges, edges.delay, blocks) + 1


def reduce_steps(ranks: int, blocks: int) -> int:
    """Return the steps of :func:`reduce`: about B + 2 log2 P."""
    edges = _edges_from_root(ranks)
    return _last(edges, edges.rising, blocks) + 1


Numbers = NDArray[np.int64]


class _Edges(NamedTuple):
    """The edges of both trees; each array of shape ``(2 (P - 1),)``."""

    tree: Numbers
    child: Numbers
    parent: Numbers
    delay: Numbers  # the step of the broadcast in which the first block comes to the child
    period: int
    """Steps between the blocks of a tree: the number of colours, 1 for two ranks, else 2."""

    @property
    def rising(self) -> Numbers:
        """The step of the reduction in which the child sends the first block."""
        return np.asarray(self.delay.max() - self.delay)

    def last(self, first: Numbers, blocks: int) -> Numbers:
        """Return the step of the last block on each edge that is used, given that of the first."""
        return first + (blocks - 1 - self.tree) // 2 * self.period


def _edges_from_root(ranks: int) -> _Edges:
    """Return the edges of two trees over the ranks from 1 on, and from rank 0 to both roots."""
    tree, child, parent, roots = _trees(ranks - 1)
    return _timed(
        np.append(tree, [0, 1]), np.append(child, roots) + 1, np.append(parent + 1, [0, 0]), (0, 0)
    )


def _trees(ranks: int) -> tuple[Numbers, Numbers, Numbers, tuple[int, int]]:
    """Return two trees over the same ranks: for each edge its tree and ends, and the two roots."""
    first = _parents(ranks)
    # For even P the second tree is the first one's mirror image, which turns leaves into inner
    # ranks; for odd P, it is the first one shifted by one rank.
    if ranks % 2 == 0:
        second = ranks - 1 - first[::-1]
        roots = (0, ranks - 1)
    else:
        second = (np.roll(first, 1) + 1) % ranks
        roots = (0, 1 % ranks)
    children = [np.delete(np.arange(ranks), root) for root in roots]
    tree = np.repeat([0, 1], ranks - 1)
    parent = np.concatenate([first[children[0]], second[children[1]]])
    return tree, np.concatenate(children), parent, roots


def _timed(tree: Numbers, child: Numbers, parent: Numbers, roots: tuple[int, int]) -> _Edges:
    """Colour the edges, and find when each is used first; arguments as :func:`_trees` returns."""
    colour = _two_colours(child, parent)
    delay = np.full((2, len(tree) // 2 + 1), -1)
    for t in (0, 1):
        below: dict[int, list[tuple[int, int]]] = {}
        for edge in np.flatnonzero(tree == t):
            below.setdefault(int(parent[edge]), []).append((int(child[edge]), int(colour[edge])))
        reached = [roots[t]]
        for rank in reached:  # grows while it is read
            for next_rank, next_colour in below.get(rank, ()):
                at = int(delay[t, rank]) + 1
                delay[t, next_rank] = at + (at % 2 != next_colour)
                reached.append(next_rank)
    return _Edges(tree, child, parent, delay[tree, child], int(colour.max()) + 1)


def _up(edges: _Edges, blocks: int) -> Transfers:
    """Reduce towards the roots: the broadcast backwards, but with the first blocks first."""
    reverse = edges._replace(child=edges.parent, parent=edges.child)
    return _down(reverse._replace(delay=edges.rising), blocks, reduces=True)


def _down(edges: _Edges, blocks: int, *, first_step: int = 0, reduces: bool = False) -> Transfers:
    """Send each tree's blocks from parents to children, first blocks first."""
    parts = []
    for tree in (0, 1):
        here = edges.tree == tree
        block = np.arange(tree, blocks, 2)
        parts.append(
            Transfers.of(
                step=first_step + edges.delay[here][:, None] + block // 2 * edges.period,
                source=edges.parent[here][:, None],
                destination=edges.child[here][:, None],
                block_start=block,
                reduces=reduces,
            )
        )
    return together(*parts)


def _last(edges: _Edges, first: Numbers, blocks: int) -> int:
    """Return the step in which the last block is sent, given when each edge sends its first."""
    return int(edges.last(first, blocks)[edges.tree < blocks].max())


def _parents(ranks: int) -> Numbers:
    """Return each rank's parent in a binary tree of logarithmic depth; rank 0 is its own.

    A rank with the lowest set bit 2^k has children 2^(k-1) before and after it, where they exist.
    """
    parent = np.zeros(ranks, dtype=np.int64)
    for rank in range(1, ranks):
        bit = rank & -rank
        above = (rank ^ bit) | (bit << 1)
        parent[rank] = above if above < ranks else rank ^ bit
    return parent


def _two_colours(child: Numbers, parent: Numbers) -> Numbers:
    """Return a colour, 0 or 1, for each edge; no rank has two of one colour on one side.

    Edges that share a receiver, or a sender, are pairs. Following pairs of either kind in turn
    gives paths and even cycles, for which two colours suffice.
    """
    neighbours: list[list[int]] = [[] for _ in child]
    for ends in (child, parent):
        last: dict[int, int] = {}
        for edge, rank in enumerate(ends.tolist()):
            if rank in last:
                neighbours[edge].append(last[rank])
                neighbours[last[rank]].append(edge)
            last[rank] = edge
    colour = np.full(len(child), -1)
    for start in range(len(child)):
        if colour[start] >= 0:
            continue
        colour[start] = 0
        path = [start]
        while path:
            edge = path.pop()
            for other in neighbours[edge]:
                if colour[other] < 0:
                    colour[other] = 1 - colour[edge]
                    path.append(other)
    return colour


def _broadcast_from(edges: _Edges, ranks: int, blocks: int) -> int:
    """Return the first step of the broadcast: by then the reduction has freed each rank's links."""
    in_use = edges.tree < blocks
    last = edges.last(edges.rising, blocks)
    turn = int(edges.delay.max()) + 1  # the first sums are at the roots
    never = np.iinfo(np.int64).max
    # Children send in the reduction and parents in the broadcast; receivers are the others.
    for reducing, broadcasting in ((edges.child, edges.parent), (edges.parent, edges.child)):
        busy_until = np.full(ranks, -1)
        np.maximum.at(busy_until, reducing[in_use], last[in_use])
        first = np.full(ranks, never)
        np.minimum.at(first, broadcasting[in_use], edges.delay[in_use])
        both = (busy_until >= 0) & (first < never)
        turn = max(turn, int((busy_until - first)[both].max(initial=-1)) + 1)
    return turn
