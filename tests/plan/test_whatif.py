"""``WhatIf``: what it computes from its points, its file form, what it refuses; predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncline.errors import FileError, UserError
from syncline.plan.prediction import Prediction
from syncline.plan.whatif import Bottleneck, Crossing, PathPart, Point, Setting, Split, WhatIf
from tests.plan.documents import COMPARISON, prediction

ROW = COMPARISON.predictions[0]


def point(workers: int, *predictions: Prediction, **setting: Any) -> Point:
    return Point(
        setting=Setting(workers=workers, algorithm="ring", **setting),
        network="n",
        alone_s=0.08,
        computing_s=0.05,
        predictions=predictions or (prediction("a", 0.2), prediction("b", 0.16)),
    )


LIMIT = Bottleneck(
    point=0,
    planner="b",
    kind="communication",
    share=0.375,
    sentence="communication-bound",
    split=Split(computing_s=0.05, loading_s=0.03, straggling_s=0.02, exposed_s=0.06),
)
CROSSING = Crossing(
    axis="workers", point=1, before=4.0, after=8.0, at=5.0, planner="a", kind="overtakes", other="b"
)
STUDY = WhatIf(model="m", network="n", points=(point(4), point(8)), bottleneck=LIMIT)


def study(**changes: object) -> WhatIf:
    return msgspec.structs.replace(STUDY, **changes)


def crossing(**changes: object) -> dict[str, object]:
    return {"crossings": (msgspec.structs.replace(CROSSING, **changes),)}


def limit(**changes: object) -> dict[str, object]:
    return {"bottleneck": msgspec.structs.replace(LIMIT, **changes)}


def test_the_figures_of_a_point() -> None:
    made = point(4)
    assert made.best.planner == "b"
    assert made.efficiency(made.best) == pytest.approx(0.5)
    assert made.speed_up(made.best) == pytest.approx(2.0)
    split = made.split(made.best)
    assert msgspec.structs.astuple(split) == pytest.approx((0.05, 0.03, 0.02, 0.06))
    assert split.iteration_s == pytest.approx(0.16)
    assert made.of("a").iteration_s == 0.2
    with pytest.raises(UserError, match="no prediction for planner 'c'"):
        made.of("c")


def test_of_equals_the_one_with_fewer_messages_is_the_best() -> None:
    many = msgspec.structs.replace(prediction("many", 0.2), messages=9)
    assert point(4, many, prediction("few", 0.2)).best.planner == "few"


@pytest.mark.parametrize(
    ("split", "bound"),
    [
        ((1.0, 0.0, 0.0, 0.0), "compute"),
        ((0.96, 0.0, 0.0, 0.04), "compute"),
        ((0.94, 0.0, 0.0, 0.06), "communication"),
        ((0.5, 0.3, 0.1, 0.1), "loading"),
        ((0.5, 0.1, 0.3, 0.1), "straggler"),
        ((0.0, 0.0, 0.0, 0.0), "compute"),
    ],
)
def test_what_limits_an_iteration(split: tuple[float, ...], bound: str) -> None:
    fields = Split.__struct_fields__
    assert Split(**dict(zip(fields, split, strict=True))).bound == bound


def test_an_iteration_of_no_time() -> None:
    made = point(4, prediction("a", 0.0, computation_s=0.0))
    assert made.efficiency(made.best) == 1.0
    assert made.split(made.best).bound == "compute"


def test_what_is_swept() -> None:
    made = study(points=(point(4), point(8, wire="bfloat16")))
    assert made.swept == ("workers", "wire")
    assert made.planners == ("a", "b")
    assert made.chosen == made.points[0]


def test_the_path_by_kind() -> None:
    parts = [("message", 0.5), ("forward", 0.2), ("message", 0.25)]
    path = tuple(PathPart(kind=kind, label="x", time_s=time_s) for kind, time_s in parts)
    found = msgspec.structs.replace(LIMIT, path=path).by_kind()
    assert list(found.items()) == [("message", 0.75), ("forward", 0.2)]


def test_the_file_form(tmp_path: Path) -> None:
    settings = {"stragglers": ((3, 1.2),), "bandwidth_bytes_per_s": 1.25e9}
    made = study(
        points=(point(4, **settings), point(8, **settings), point(8, density=0.001)),
        crossings=(CROSSING,),
        **limit(path=(PathPart(kind="message", label="x", time_s=0.1, rank=3),)),
        notes=("a note",),
    )
    made.save(tmp_path / "what-if.json")
    assert WhatIf.load(tmp_path / "what-if.json") == made
    text = (tmp_path / "what-if.json").read_text()
    assert '"format": "syncline/what-if"' in text
    assert '"version": 1' in text
    with pytest.raises(FileError, match="point"):
        WhatIf.from_json(text.replace('"point": 1', '"point": 7'))


def test_settings_that_cannot_be() -> None:
    wrong: dict[str, Any] = {"bandwidth_bytes_per_s": 0.0, "density": -1.0, "jitter": -0.1}
    wrong |= {"compute_scale": 0.0, "stragglers": ((0, -1.0),), "latency_s": -1e-6}
    wrong |= {"spread": float("inf")}
    for field, value in wrong.items():
        with pytest.raises(UserError, match=r"what-if: .* must be finite and"):
            point(4, **{field: value})
    with pytest.raises(UserError, match="what-if: workers must be at least 1"):
        point(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"points": ()}, "no points"),
        ({"points": (point(4), point(8, prediction("a", 0.2)))}, r"\[1\]: .* of a, b, found a"),
        (limit(point=2), "bottleneck: there are 2 points, found 2"),
        (limit(planner="c"), "no prediction for planner 'c'"),
        (crossing(point=-1), r"crossings\[0\]: there are 2 points, found -1"),
        (crossing(before=5), "and no such point"),
        (crossing(before=8), "before 8, at 5, after 8"),
        (crossing(at=9), "before 4, at 9, after 8"),
        (crossing(after=9), "workers of points.1. is 8"),
        (crossing() | {"points": (point(4), point(8, jitter=0.1))}, "and no such point"),
    ],
)
def test_what_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        study(**changes)


def test_a_point_needs_a_prediction_and_times() -> None:
    with pytest.raises(UserError, match="a point without a prediction"):
        msgspec.structs.replace(point(4), predictions=())
    with pytest.raises(UserError, match="alone_s must be a finite time"):
        msgspec.structs.replace(point(4), alone_s=-1.0)


def test_the_distance_to_the_bound() -> None:
    assert ROW.distance_to_bound == pytest.approx(2.0 / 1.5 - 1)
    assert msgspec.structs.replace(ROW, lower_bound_s=0.0).distance_to_bound == 0


def test_a_prediction_by_its_planner() -> None:
    assert COMPARISON.of("ddp") is ROW
    with pytest.raises(UserError, match="no prediction for planner 'merge'"):
        COMPARISON.of("merge")
