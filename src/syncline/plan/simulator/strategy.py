"""``Strategy``: which tasks a framework overlaps (dag-model, section IV-C)."""

from __future__ import annotations

from typing import Literal

from syncline.errors import UserError, quoted, require_known
from syncline.plan.document import Value
from syncline.plan.quantities import require_count


class Strategy(Value, frozen=True, kw_only=True):
    """Which tasks of an iteration may overlap, and with what."""

    name: str
    prefetch_data: bool = False
    """Whether the next batches are read during computing (dag-model, Eq. 3), not by the loop."""
    prefetch_copy: bool = False
    """Whether the next batch is copied to the device during computing, into a second buffer."""
    one_loader: bool = False
    """One thread reads and copies in turn, so that a batch costs ``t_io + t_h2d`` (Eq. 3 to 5).
    Otherwise reading and copying are a pipeline, and the slower of the two counts."""
    loaders: int = 1  # loader processes, each reading one batch at a time
    ahead: int = 2
    """Batches that may be read but not yet copied (or, without copies, not yet used); at least as
    many as there are loaders."""
    overlap_communication: bool = True
    """Messages go out while the backward pass runs (wait-free backpropagation); else after it."""
    exchange: Literal["all-reduce", "parameter-server"] = "all-reduce"
    """A parameter server receives a push from each worker and answers with a pull, both over its
    own link, which all workers share; the two directions run at the same time. A plan's
    ``in_flight`` has no effect; a reduce-scatter is a push, an all-gather a pull."""
    compute: Literal["stream", "unlimited"] = "stream"
    """``stream``: a device runs one operation at a time in the profile's order, as GPUs do.
    ``unlimited``: each runs as soon as what it depends on is done (PACE, section IV-A)."""

    def __post_init__(self) -> None:
        for field in ("loaders", "ahead"):
            require_count(f"strategy {quoted(self.name)}: {field}", getattr(self, field))
        for idle, field, reason in (
            (self.loaders > 1 and not self.prefetch_data, "loaders", "prefetch_data"),
            (self.one_loader and not self.prefetch_copy, "one_loader", "prefetch_copy"),
        ):
            if idle:
                raise UserError(
                    f"strategy {quoted(self.name)}: {field} has no effect without {reason}"
                )


_PRESETS = (
    Strategy(name="loop"),  # DDP
    Strategy(name="s-sgd", overlap_communication=False),  # dag-model, Eq. 2
    Strategy(  # dag-model, Eq. 5
        name="caffe-mpi", prefetch_data=True, prefetch_copy=True, one_loader=True
    ),
    Strategy(name="mxnet", prefetch_data=True),
    Strategy(name="tensorflow", prefetch_data=True),
    Strategy(name="cntk", prefetch_data=True, overlap_communication=False),
    Strategy(name="pytorch", prefetch_data=True, prefetch_copy=True),
    Strategy(name="parameter-server", prefetch_data=True, exchange="parameter-server"),
)

STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _PRESETS}
"""Presets by name. Caffe-MPI, MXNet, TensorFlow and CNTK: dag-model, sections IV-C and V-C."""
DEFAULT_STRATEGY = STRATEGIES["loop"]


def strategy_named(name: str) -> Strategy:
    """Return the preset of that name; raise :class:`UserError` if there is none."""
    require_known("strategy", name, STRATEGIES)
    return STRATEGIES[name]
