"""``Prediction`` of one plan, ``Comparison`` of all, and ``Suggestion`` of sparse exchange."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from syncline.errors import UserError, quoted
from syncline.plan.document import Document, Value
from syncline.plan.quantities import NS_PER_S, require_finite

LEAST_GAIN = 1.05  # least speed-up at which a lossy exchange is worth mentioning
WHOLE_FROM = 10.0  # speed-ups from here on are shown as whole numbers


class Suggestion(Value, frozen=True, kw_only=True):
    """Predicted iterations with the fastest sparse exchange, and in 16 and 8 bits; never chosen."""

    algorithm: str  # one of :data:`syncline.plan.sparse_costs.SPARSE_ALGORITHMS`
    density: float
    iteration_s: float
    dense_s: float  # the iteration without compression
    rounded_s: float | None = None
    """The iteration with every element in bfloat16; None if that is not known."""
    int8_s: float | None = None
    """The iteration with every element in int8; None if that is not known."""
    selecting_counted: bool  # whether the prediction includes the time of selecting and merging
    on_gpu: bool = False
    """Whether gradients are on a GPU. Selecting is then predicted at the speed of a CPU, and
    copying to and from the host is left out."""

    def __post_init__(self) -> None:
        for field in ("iteration_s", "dense_s"):
            require_finite(f"suggestion: {field}", getattr(self, field), above_0=True)

    @property
    def gain(self) -> float:
        """How many times faster an iteration would be."""
        return self.dense_s / self.iteration_s

    @property
    def pays(self) -> bool:
        """Whether it is worth mentioning."""
        return self.gain >= LEAST_GAIN

    @property
    def sentence(self) -> str:
        """The suggestion as a sentence for the user."""
        taken: dict[str, float] = {}
        least_s = self.dense_s
        for name, seconds in (("bfloat16", self.rounded_s), ("int8", self.int8_s)):
            if seconds is not None and least_s >= LEAST_GAIN * seconds:
                taken[name] = least_s = seconds
        if not taken:
            return self._sparse_sentence
        gains = (f"{s} would take {_time(t)} ({self.dense_s / t:.1f}x)" for s, t in taken.items())
        rounded = (
            f"{' and '.join(gains)} instead of {_time(self.dense_s)} an iteration; ask for it by "
            f"compression={' or '.join(map(repr, taken))}"
        )
        return f"{rounded}; {self._sparse_sentence}" if self.pays else rounded

    @property
    def _sparse_sentence(self) -> str:
        which = f"{self.algorithm} at density {self.density:g}"
        free = [] if self.selecting_counted else ["selecting"]
        free += ["copying through the host"] if self.on_gpu else []
        left_out = f", if {' and '.join(free)} took no time" if free else ""
        if not self.pays:
            return (
                f"would gain nothing: dense is as fast ({which}: {_time(self.iteration_s)} instead "
                f"of {_time(self.dense_s)} an iteration{left_out})"
            )
        times = f"{self.gain:.1f}" if self.gain < WHOLE_FROM else f"{self.gain:.0f}"
        return (
            f"{which} would take {_time(self.iteration_s)} instead of {_time(self.dense_s)} an "
            f"iteration ({times}x{left_out}); lossy, so never switched on by itself; ask for it by "
            f"compression=Recipe(algorithm='{self.algorithm}', density={self.density:g})"
        )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


class Sharing(Value, frozen=True, kw_only=True):
    """How other jobs that share the links lengthen an iteration."""

    jobs: int  # how many there are, all alike
    alone_s: float  # the iteration without the others
    shortest_s: float  # the iteration at the best of the simulated offsets between the jobs
    longest_s: float

    def __post_init__(self) -> None:
        for field in ("alone_s", "shortest_s", "longest_s"):
            require_finite(f"prediction of jobs that share links: {field}", getattr(self, field))


class Prediction(Value, frozen=True, kw_only=True):
    """The predicted times of one iteration under one plan."""

    planner: str
    messages: int
    iteration_s: float  # 0, or at least a nanosecond
    computation_s: float  # all operations of the profile, run without communication
    communication_s: float  # all messages, run without computation
    exposed_s: float  # iteration time beyond computation: t_c^no of MG-WFBP, Table 1
    lower_bound_s: float  # max(computation, least communication): no schedule can be faster
    error_s: float = 0.0  # standard error of ``iteration_s`` if simulated iterations differ; else 0
    interval_s: tuple[float, float] | None = None
    """The ends of the 90 % prediction interval of ``iteration_s``; None in older files."""
    sharing: Sharing | None = None
    """Set if other jobs share the links. Then ``iteration_s`` is a mean over their offsets, and the
    bound is that of a job alone."""

    def __post_init__(self) -> None:
        where = f"prediction of {quoted(self.planner)}"
        if self.messages < 0:
            raise UserError(f"{where}: messages is negative: {self.messages}")
        for field in self.__struct_fields__:
            if field.endswith("_s") and field != "interval_s":
                require_finite(f"{where}: {field}", getattr(self, field))
        low_s, high_s = self.interval_s or (0.0, 0.0)
        require_finite(f"{where}: interval_s", low_s)
        require_finite(f"{where}: interval_s", high_s - low_s)
        if 0 < self.iteration_s * NS_PER_S < 0.5:
            raise UserError(
                f"{where}: iteration_s is {self.iteration_s} s, shorter than a nanosecond"
            )

    @property
    def preference(self) -> tuple[float, float, int]:
        """Sort key: the shorter iteration, then the least time on the link, then fewer messages."""
        return self.iteration_s, self.communication_s, self.messages

    @property
    def slowdown(self) -> float:
        """The iteration time over that without other jobs."""
        alone_s = self.sharing.alone_s if self.sharing else 0.0
        return self.iteration_s / alone_s if alone_s > 0 else 1.0

    @property
    def sharing_sentence(self) -> str:
        """The effect of sharing the links as a sentence for the user; empty for a job alone."""
        shared = self.sharing
        if shared is None:
            return ""
        return (
            f"{shared.jobs} jobs share the links: an iteration of each takes "
            f"{_time(self.iteration_s)} in the mean, {_time(shared.shortest_s)} to "
            f"{_time(shared.longest_s)} by how they are offset, {self.slowdown:.2f} times as long "
            f"as alone ({_time(shared.alone_s)})"
        )

    @property
    def distance_to_bound(self) -> float:
        """How far the iteration is above the lower bound, as a fraction of the bound."""
        return self.iteration_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0


def of_planner(predictions: Iterable[Prediction], planner: str, where: str) -> Prediction:
    """Return the prediction for ``planner``; raise :class:`UserError` with ``where`` if none is."""
    for prediction in predictions:
        if prediction.planner == planner:
            return prediction
    raise UserError(f"no prediction for planner {quoted(planner)} {where}")


class Comparison(Document, frozen=True, kw_only=True):
    """The predictions of several planners for one profile and network.

    Raises:
        UserError: on construction, if the chosen planner has no prediction.
    """

    KIND: ClassVar[str] = "comparison"
    VERSION: ClassVar[int] = 1

    model: str
    network: str
    workers: int
    predictions: tuple[Prediction, ...]
    chosen: str  # the planner that ``auto`` takes
    reason: str  # why, in a sentence
    suggestion: Suggestion | None = None
    """The prediction for sparse exchange, which is never chosen."""

    def __post_init__(self) -> None:
        if self.chosen not in {p.planner for p in self.predictions}:
            raise UserError(f"comparison: chosen planner {quoted(self.chosen)} is not in the table")

    def of(self, planner: str) -> Prediction:
        """Return the prediction for ``planner``; raise :class:`UserError` if there is none."""
        return of_planner(self.predictions, planner, "in this comparison")
