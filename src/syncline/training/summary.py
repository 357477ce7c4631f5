"""What ``syncline train`` says at the end: a short text, or one JSON object."""

from __future__ import annotations

from typing import Any

import msgspec

from syncline.model.run import Rate, Run, Sent
from syncline.training.config import TrainingConfig
from syncline.training.result import (
    BASELINE,
    COMMUNICATION,
    COMPUTATION,
    DIFFERENCE,
    SETTLING,
    SYNCLINE,
    iteration_profile,
    rate_named,
    report_path,
    speed_ratio,
)

__all__ = ["summary_json", "summary_text"]

LABEL_WIDTH = 24


def summary_text(config: TrainingConfig, run: Run) -> str:
    """Return the results, the rates, the prediction and the decision, a line each."""
    rows = [_figure(name, value) for name, value in run.results.items() if _shown(name, run)]
    rows += [(rate.name, _rate(rate)) for rate in run.rates]
    ratio = speed_ratio(run)
    if ratio is not None:
        rows.append(("speed-up", f"{ratio[0]:.3f} +- {ratio[1]:.3f} ({SYNCLINE} over {BASELINE})"))
    elif config.baseline:
        rows.append(("speed-up", "unknown: training ended before the measurement did"))
    if DIFFERENCE in run.results:
        rows.append(("parameters", _identity(run.results[DIFFERENCE])))
    predicted, measured = _prediction(run)
    if predicted is not None and measured is not None:
        error = f"{(predicted / measured - 1) * 100:+.1f} %"
        times = f"{_ms(predicted)} / {_ms(measured)} an iteration"
        rows.append(("predicted / measured", f"{times}: {error}"))
    divided = iteration_profile(run)
    if divided is not None:
        times = f"comm {_ms(divided.communication_s)}, compt {_ms(divided.computation_s)}"
        share = f"comm % {divided.communication_share * 100:.1f}"
        rows.append(("iteration profile", f"{times}, {share}"))
    if run.compression is not None and run.sent is not None:
        rows.append(("compression", _compression(config, run.sent)))
    rows.append(("decision", f"{run.decision}: {run.reason}"))
    if run.suggestion is not None and run.compression is None:
        rows.append(("suggestion", f"compression: {run.suggestion.sentence}"))
    rows.append(("report", str(report_path(config))))
    title = f"{config.model} on {config.data}, {run.workers} workers ({run.backend})"
    width = max(LABEL_WIDTH, *(len(label) + 1 for label, _ in rows))
    return "\n".join([title, *(f"  {label:<{width}}{text}" for label, text in rows)])


def summary_json(config: TrainingConfig, run: Run) -> str:
    """Return one line with one JSON object: the record, and what was derived from it."""
    predicted, measured = _prediction(run)
    ratio = speed_ratio(run)
    difference = run.results.get(DIFFERENCE)
    divided = iteration_profile(run)
    fields: dict[str, Any] = {
        "model": config.model,
        "data": config.data,
        "strategy": config.strategy,
        "workers": run.workers,
        "backend": run.backend,
        "machine": run.machine,
        "decision": run.decision,
        "reason": run.reason,
        "planner": run.planner,
        "messages": run.messages,
        "deferred": run.deferred,
        "compression": run.compression,
        "sent": run.sent,
        "suggestion": run.suggestion,
        "results": run.results,
        "rates": run.rates,
        "speed_up": None if ratio is None else ratio[0],
        "speed_up_noise": None if ratio is None else ratio[1],
        "identical_parameters": None if difference is None else difference == 0,
        "iteration_profile": None
        if divided is None
        else {
            "communication_s": divided.communication_s,
            "computation_s": divided.computation_s,
            "communication_share": divided.communication_share,
        },
        "predicted_s": predicted,
        "measured_s": measured,
        "prediction_error": run.prediction_error,
        "report": str(report_path(config)),
        "checkpoint": config.checkpoint,
    }
    return msgspec.json.encode(fields).decode()


def _prediction(run: Run) -> tuple[float | None, float | None]:
    """Return the predicted and the measured iteration time of what ran at the end."""
    measured = run.measured or rate_named(run, SYNCLINE)
    return run.predicted_s, None if measured is None else measured.iteration_s


def _shown(name: str, run: Run) -> bool:
    if name.startswith(BASELINE):  # what it reached says nothing new where the bits are the same
        return run.results.get(DIFFERENCE) != 0
    return name not in ("epochs", "steps", SETTLING, DIFFERENCE, COMMUNICATION, COMPUTATION)


def _figure(name: str, value: float) -> tuple[str, str]:
    if name.endswith("accuracy"):
        return name, f"{value * 100:.2f} %"
    if name.endswith("seconds"):
        return name, f"{value:.1f}"
    return name, f"{value:.4f}"


def _rate(rate: Rate) -> str:
    samples = "" if rate.samples_per_s is None else f", {rate.samples_per_s:.0f} samples/s"
    return (
        f"{_ms(rate.iteration_s)} +- {rate.noise_s * 1e3:.2f} an iteration "
        f"({rate.iterations} iterations){samples}"
    )


def _compression(config: TrainingConfig, sent: Sent) -> str:
    if sent.steps == 0:
        return f"{config.compression_text}: no step was compressed"
    a_step = sent.sent_bytes / sent.steps
    return (
        f"{config.compression_text}: {sent.steps} steps, {a_step / 1e6:.3f} MB sent a step for "
        f"{sent.gradient_bytes / 1e6:.3f} MB of gradients"
    )


def _identity(difference: float) -> str:
    if difference == 0:
        return f"bit-identical to those of {BASELINE}"
    return f"differ from those of {BASELINE} by up to {difference:.2e}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
