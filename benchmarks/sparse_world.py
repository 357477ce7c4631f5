"""A world of ranks in one process, in which exchanges run step by step in one fixed order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from syncline.errors import InternalError
from syncline.train.sparse.algorithms import Algorithm, Content, ExchangeOutcome, Share

__all__ = ["run_in_one_process"]

Carried = Callable[[tuple[Content, ...]], tuple[Content, ...]]


def run_in_one_process(
    algorithm: Algorithm,
    shares: Sequence[Share],
    carried: Carried = lambda contents: contents,
) -> list[ExchangeOutcome]:
    """Run an exchange of all ranks and return how it ended on each.

    Sends do not wait; a rank that receives goes on once the contents are there.

    Args:
        algorithm: of :data:`syncline.train.sparse.algorithms.ALGORITHMS`.
        shares: one a rank, in their order.
        carried: what becomes of contents on their way, such as being written and read.

    Raises:
        InternalError: the ranks wait for each other, or expect other contents than were sent.
    """
    mail: dict[tuple[int, int], deque[tuple[Content, ...]]] = {}
    outcomes: dict[int, ExchangeOutcome] = {}
    runs = [algorithm(share) for share in shares]
    waiting = {}

    def go_on(rank: int, arrived: tuple[Content, ...] | None) -> None:
        try:
            step = runs[rank].send(arrived)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as ended:
            outcomes[rank] = ended.value
            return
        if step.send_to is not None:
            mail.setdefault((rank, step.send_to), deque()).append(carried(step.contents))
        waiting[rank] = step

    for rank in range(len(shares)):
        go_on(rank, None)
    while waiting:
        ready = [
            rank
            for rank, step in waiting.items()
            if step.receive_from is None or mail.get((step.receive_from, rank))
        ]
        if not ready:
            raise InternalError(f"ranks {sorted(waiting)} wait for each other: {waiting}")
        for rank in ready:
            step = waiting.pop(rank)
            arrived: tuple[Content, ...] = ()
            if step.receive_from is not None:
                arrived = mail[step.receive_from, rank].popleft()
            if len(arrived) != step.receives:
                raise InternalError(
                    f"rank {rank} expected {step.receives} contents, {len(arrived)} came"
                )
            go_on(rank, arrived)
    left = [pair for pair, letters in mail.items() if letters]
    if left:
        raise InternalError(f"sent and never received: {left}")
    return [outcomes[rank] for rank in range(len(shares))]
