"""``Waits``: how long training waited for the engine's messages, and whether it read too early."""

from __future__ import annotations

from collections import deque

from syncline.plan.profile import Norm
from syncline.train.engine.recording import WaitTimes

KEPT_WAITS = 4096  # waits whose times are kept: an iteration has at most one for each module


class Waits:
    """The waits of a model whose updates are deferred, round after round."""

    def __init__(self) -> None:
        self.read_early = False  # whether gradients of the present round were read before ``step``
        self.forced_sync = False  # whether the round's updates were made outside a forward pass
        self.asked_norm: Norm | None = None  # the last norm that was asked for and not in the plan
        self.stalling_ns = 0  # how long computation has waited for gradients in the present round
        self.stall_ns = 0  # the same for the last round
        self._rounds = self._early_reads = self._forced_syncs = 0
        self._noted: deque[WaitTimes] = deque(maxlen=KEPT_WAITS)

    def end_backward(self) -> None:
        """Call at the end of a backward pass: the time of waits starts again at 0."""
        self.stall_ns, self.stalling_ns = self.stalling_ns, 0

    def end_round(self) -> None:
        """Call when the updates of a round are deferred to the next forward pass."""
        self.end_backward()
        self._rounds += 1
        self._early_reads += self.read_early
        self._forced_syncs += self.forced_sync
        self.read_early = self.forced_sync = False

    def note(self, label: str, began_ns: int, arrived_ns: int, updated_ns: int) -> None:
        """Note a wait; see :class:`WaitTimes`."""
        self._noted.append(WaitTimes(label, began_ns, arrived_ns, updated_ns))

    def take_waits(self) -> list[WaitTimes]:
        """Return the noted waits since the last call."""
        taken = list(self._noted)
        self._noted.clear()
        return taken

    def forced_syncs(self, *, always: bool) -> tuple[str, Norm | None] | None:
        """Return why little has overlapped with forward passes, and the last norm asked for.

        None if there is no reason that holds in most rounds since the last call or, with
        ``always``, in all of them.
        """
        rounds, early, forced = self._rounds, self._early_reads, self._forced_syncs
        self._rounds = self._early_reads = self._forced_syncs = 0
        # Reads in the present round, and at the end of the first, are not counted yet.
        most = max(rounds - 1.5, 0.5) if always else rounds / 2
        if early > most and self.asked_norm is not None:
            reason = (
                f"gradients are read before each step for their {self.asked_norm}-norm, which the "
                "plan does not exchange (its field norm); such a read waits for the whole exchange"
            )
        elif early > most:
            reason = (
                "gradients are read before each step, and not only to clip them; such a read waits "
                "for the whole exchange"
            )
        elif forced > most:
            reason = (
                "parameters are read between each step and the next forward pass; such a read "
                "waits for the whole exchange (model.average keeps averages without one)"
            )
        else:
            return None
        return reason, self.asked_norm
