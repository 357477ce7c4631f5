"""What sparse exchanges cost: gTop-k, Table I, as functions of the dense message.

Each worker keeps the k largest of m elements, ``k = rho m``, and sends values and indices. The
paper sends "2k values", which is right for indices as wide as the values; here a kept element takes
its own bytes and those of its index. Its beta is a time per byte (section IV.C), so its m and k
must be read as bytes, as in its Fig. 9 (m = 100 MB), and not as numbers of elements. Read so, Eq. 6
and 7 agree with Table I and with the algorithms. k is not rounded to whole elements.

``P`` workers; per kept byte of value ``w = 1 + index width / value width`` bytes travel:

- TopKAllReduce, Eq. 6: an all-gather, ``ceil(log2 P) alpha + (P - 1) rho w M beta``.
- gTopKAllReduce, Eq. 7: a tree of merges and a broadcast,
  ``2 ceil(log2 P) (alpha + rho w M beta)``. The paper calls the broadcast a flat tree; a flat tree
  takes P - 1 sends of the root, and the ``log2 P`` rounds are those of a binomial tree.
- butterfly, ours: both partners of a round send, and compute the same merge, so no broadcast is
  needed: ``log2 P (alpha + rho w M beta)``, half of Eq. 7. A merge of overlapping parts would count
  values twice, so surplus workers fold in first: ``floor(log2 P) + 2`` rounds for no power of two.

Selecting and merging are computation and are not counted, as in the paper. For a dense exchange
(Eq. 5) take the ring of ``ALL_REDUCE_ALGORITHMS``, which is the same without gamma.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from syncline.errors import UserError, did_you_mean
from syncline.model.cost import CostCurve
from syncline.model.rounds import doubling_rounds, folded_rounds, require_workers

__all__ = ["SPARSE_ALGORITHMS", "sparse_line"]


def _top_k(workers: int) -> tuple[int, int]:
    return doubling_rounds(workers), workers - 1


def _gtop_k(workers: int) -> tuple[int, int]:
    return 2 * doubling_rounds(workers), 2 * doubling_rounds(workers)


def _gtop_k_butterfly(workers: int) -> tuple[int, int]:
    return folded_rounds(workers), folded_rounds(workers)


SPARSE_ALGORITHMS: dict[str, Callable[[int], tuple[int, int]]] = {
    "top-k": _top_k,
    "gtop-k": _gtop_k,
    "gtop-k-butterfly": _gtop_k_butterfly,
}
"""name -> workers -> (startups, selections of k elements sent one after another)."""


def sparse_line(
    algorithm: str,
    *,
    workers: int,
    alpha_s: float,
    beta_s_per_byte: float,
    density: float,
    element_bytes: int = 4,
    index_bytes: int = 4,
) -> CostCurve:
    """Return the cost of a sparse exchange as a line in the bytes of the dense message.

    Args:
        algorithm: a key of :data:`SPARSE_ALGORITHMS`.
        workers: P, at least 1; one worker exchanges nothing.
        alpha_s: startup time between two workers.
        beta_s_per_byte: transmission time between two workers.
        density: rho, above 0 and at most 1: the share of elements that each worker sends.
        element_bytes: width of a value.
        index_bytes: width of an index.

    Raises:
        UserError: the algorithm is unknown, or a value is out of its range.
    """
    if algorithm not in SPARSE_ALGORITHMS:
        hint = did_you_mean(algorithm, SPARSE_ALGORITHMS)
        known = ", ".join(SPARSE_ALGORITHMS)
        raise UserError(f"unknown sparse exchange {algorithm!r}{hint} (known: {known})")
    require_workers(workers)
    if not (math.isfinite(density) and 0 < density <= 1):
        raise UserError(f"density must be above 0 and at most 1, found {density}")
    if element_bytes < 1 or index_bytes < 0:
        raise UserError(
            "a sparse exchange needs elements of at least 1 byte and indices of at least 0, found "
            f"{element_bytes} and {index_bytes}"
        )
    if workers == 1:
        return CostCurve.line(0.0, 0.0)
    startups, selections = SPARSE_ALGORITHMS[algorithm](workers)
    sent_share = density * (1 + index_bytes / element_bytes)
    return CostCurve.line(startups * alpha_s, selections * sent_share * beta_s_per_byte)
