"""Collectives carried out step by step, to count what the formulas promise.

In a step a worker sends at most one message and receives at most one, as over one full-duplex port.
"""

from __future__ import annotations

from collections import deque


def chain_broadcast(workers: int, blocks: int) -> int:
    """Return the steps until all have every block that worker 0 passes down the chain."""
    have = [set(range(blocks)), *(set() for _ in range(workers - 1))]
    steps = 0
    while any(len(held) < blocks for held in have):
        missing = [(i + 1, have[i] - have[i + 1]) for i in range(workers - 1)]
        for receiver, wanted in [(i, min(w)) for i, w in missing if w]:
            have[receiver].add(wanted)
        steps += 1
    return steps


def ring_pipeline_all_reduce(
    workers: int, blocks: int, *, to_the_last: bool = False
) -> tuple[int, int]:
    """Pass blocks round a ring, 0 to 1 to ... to 0; return (all steps, steps with a sum).

    Sums form on the way to the last worker and go on from it. A worker passes partial sums on
    first. With ``to_the_last`` finished sums also return to the last worker, which formed them.
    """
    last = workers - 1
    end = None if to_the_last else last - 1
    partial_at = [blocks if i == 0 else 0 for i in range(workers)]
    partial_sent, done_at, done_sent = [0] * workers, [0] * workers, [0] * workers
    returned = steps = sums = 0
    while any(done < blocks for done in done_at) or (to_the_last and returned < blocks):
        moves = []
        for i in range(workers):
            if i < last and partial_sent[i] < partial_at[i]:
                moves.append((i, True))
            elif i != end and done_sent[i] < done_at[i]:
                moves.append((i, False))
        for i, adds in moves:
            receiver = (i + 1) % workers
            if adds:
                partial_sent[i] += 1
                (done_at if receiver == last else partial_at)[receiver] += 1
            else:
                done_sent[i] += 1
                if receiver == last:
                    returned += 1
                else:
                    done_at[receiver] += 1
        steps += 1
        sums += any(adds for _, adds in moves)
    return steps, sums


def chain_all_reduce_optimum(workers: int, blocks: int) -> int:
    """Return the fewest steps to reduce down a chain to worker 0 and broadcast back up it.

    By breadth-first search over how many blocks each hop has carried, in order.
    """
    start = ((0,) * workers, (0,) * workers)
    seen, queue = {start}, deque([(start, 0)])
    while queue:
        (down, up), steps = queue.popleft()
        if all(count == blocks for count in up[1:]):
            return steps
        hops = []  # (sender, receiver, adds)
        for i in range(1, workers):
            if down[i] < (blocks if i == workers - 1 else down[i + 1]):
                hops.append((i, i - 1, True))
            if up[i] < (down[1] if i == 1 else up[i - 1]):
                hops.append((i - 1, i, False))
        for chosen in range(1, 1 << len(hops)):
            taken = [hop for bit, hop in enumerate(hops) if chosen >> bit & 1]
            if any(len({hop[end] for hop in taken}) < len(taken) for end in (0, 1)):
                continue
            further = list(down), list(up)
            for sender, receiver, adds in taken:
                further[0 if adds else 1][sender if adds else receiver] += 1
            state = (tuple(further[0]), tuple(further[1]))
            if state not in seen:
                seen.add(state)
                queue.append((state, steps + 1))
    raise AssertionError("the collective never ends")


def bruck_all_gather(workers: int) -> tuple[int, int]:
    """Return (rounds, blocks that a worker receives) of Bruck's all-gather, one block a worker."""
    have = [{i} for i in range(workers)]
    rounds = received = 0
    distance = 1
    while distance < workers:
        count = min(distance, workers - distance)
        sent = [{(i + k) % workers for k in range(count)} for i in range(workers)]
        assert all(blocks <= have[i] for i, blocks in enumerate(sent))
        for i in range(workers):
            have[i] |= sent[(i + distance) % workers]
        rounds, received, distance = rounds + 1, received + count, 2 * distance
    assert all(len(blocks) == workers for blocks in have)
    return rounds, received


def ring_all_reduce(workers: int) -> tuple[int, int]:
    """Return (rounds, blocks that a worker receives) of the ring, with one block a worker."""
    # held[i][b]: which workers' values block b of worker i sums up.
    held = [[{i} for _ in range(workers)] for i in range(workers)]
    everyone = set(range(workers))
    rounds = 0
    for turn in range(2 * (workers - 1)):
        moved = [(i, (i - turn) % workers, set(held[i][(i - turn) % workers])) for i in everyone]
        for i, block, values in moved:
            receiver = held[(i + 1) % workers]
            if turn < workers - 1:
                assert not receiver[block] & values, "a value is added twice"
                receiver[block] |= values
            else:
                receiver[block] = values
        rounds += 1
    assert all(values == everyone for row in held for values in row)
    return rounds, rounds


def binomial_broadcast(workers: int) -> int:
    """Return the rounds until a message of worker 0 is everywhere, all holders sending."""
    holders = rounds = 1
    while holders < workers:
        holders, rounds = 2 * holders, rounds + 1
    return rounds - 1


def double_tree_received(workers: int) -> list[float]:
    """Return how many messages' bytes each worker receives in a double binary tree all-reduce.

    The trees are NCCL's: in the second, workers are mirrored (even count) or shifted (odd).
    """
    received = [0.0] * workers
    for other in (False, True):
        for rank in range(1, workers):
            bit = rank & -rank
            parent = (rank ^ bit) | (bit << 1)
            if parent >= workers:
                parent = rank ^ bit
            for receiver in (rank, parent):  # the sum comes down, the part goes up
                if other and workers % 2:
                    receiver = (receiver + 1) % workers
                elif other:
                    receiver = workers - 1 - receiver
                received[receiver] += 0.5
    return received


def push_s(workers: int, servers: int, message_s: float, add_s: float) -> float:
    """Return when all servers have added a message of every worker; each adds while it receives."""
    rounds = max(workers, servers)
    sent = set()
    done_s: dict[int, float] = {}
    for turn in range(rounds):
        # Worker w sends to server (w + turn) mod rounds, where there is one.
        pairs = [(w, (w + turn) % rounds) for w in range(workers)]
        pairs = [(w, s) for w, s in pairs if s < servers]
        assert len({s for _, s in pairs}) == len(pairs)
        sent |= set(pairs)
        here_s = (turn + 1) * message_s
        done_s |= {s: max(done_s[s], here_s) + add_s if s in done_s else here_s for _, s in pairs}
    assert len(sent) == workers * servers
    return max(done_s.values())
