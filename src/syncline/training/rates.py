"""How fast the twins trained: medians over the same steps on the same batches."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.measure.statistics import median, standard_error
from syncline.model.run import Rate
from syncline.training.replica import StepTime

__all__ = ["rates"]


def rates(
    times: dict[str, Sequence[StepTime]], *, reference: str, samples_per_step: int
) -> tuple[Rate, ...]:
    """Return the iteration time of each twin.

    Left out are the first step of each block, which pays for the caches that the other twin has
    filled, and the steps during which the reference was measuring: of all twins alike, so that all
    are judged by the same batches at the same time.

    Args:
        times: name of a twin -> its steps, as long as the slowest worker took for each.
        reference: the twin that measures.
        samples_per_step: samples of all workers together.

    Returns:
        One rate a twin, in the order of ``times``; none for a twin of which no step is left, so
        none at all if training ended while the reference was measuring.
    """
    measuring = [step.measuring for step in times[reference]]
    result = []
    for name, steps in times.items():
        counted = [
            step.seconds
            for step, excluded in zip(steps, measuring, strict=True)
            if not (excluded or step.first_of_block)
        ]
        if counted:
            iteration_s = median(counted)
            result.append(
                Rate(
                    name=name,
                    iteration_s=iteration_s,
                    noise_s=standard_error(counted),
                    iterations=len(counted),
                    samples_per_s=samples_per_step / iteration_s,
                )
            )
    return tuple(result)
