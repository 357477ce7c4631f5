"""What push and pull through parameter servers cost."""

from __future__ import annotations

from syncline.errors import UserError
from syncline.model.cost import CostCurve
from syncline.model.rounds import require_workers

__all__ = ["parameter_server_line", "pull_line", "push_line"]


def push_line(
    workers: int,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
    *,
    servers: int = 1,
) -> CostCurve:
    """Return the cost of every worker's gradients reaching the servers and being added there.

    Each of P workers sends ``M / S`` bytes to each of S servers, and a port passes one message at a
    time. A server's port passes P messages and a worker's S, so ``max(P, S)`` rounds are needed; as
    the messages form a complete bipartite graph, that many suffice (König). So the cost is
    ``max(P, S) (alpha + beta M / S)``, or ``P M beta / S`` for the bytes of few servers. A server
    adds P vectors: ``(P - 1) gamma M / S``. Servers stand beside the workers, on their own links.

    Args:
        workers: P, at least 1; one worker needs no server and costs nothing.
        alpha_s: startup time of one message.
        beta_s_per_byte: transmission time of the link of a worker or a server.
        gamma_s_per_byte: time to add.
        servers: S, at least 1; gradients are spread evenly.

    Raises:
        UserError: there is no worker or no server.
    """
    require_workers(workers)
    if servers < 1:
        raise UserError(f"parameter servers: at least 1 is needed, found {servers}")
    if workers == 1:
        return CostCurve.line(0.0, 0.0)
    rounds = max(workers, servers)
    moved = rounds * beta_s_per_byte / servers
    return CostCurve.line(rounds * alpha_s, moved + (workers - 1) * gamma_s_per_byte / servers)


def pull_line(
    workers: int, alpha_s: float, beta_s_per_byte: float, *, servers: int = 1
) -> CostCurve:
    """Return the cost of every worker fetching the sums: a push without adding.

    Arguments and errors as for :func:`push_line`.
    """
    return push_line(workers, alpha_s, beta_s_per_byte, servers=servers)


def parameter_server_line(
    workers: int,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
    *,
    servers: int = 1,
) -> CostCurve:
    """Return the cost of a push and then a pull. Arguments and errors as for :func:`push_line`."""
    return CostCurve.in_turn(
        (
            push_line(workers, alpha_s, beta_s_per_byte, gamma_s_per_byte, servers=servers),
            pull_line(workers, alpha_s, beta_s_per_byte, servers=servers),
        )
    )
