from __future__ import annotations

import pytest

from syncline.errors import UserError, quoted, require_known, shortened, unknown


def test_values_in_messages_are_short() -> None:
    for value, said in (
        ([[]], "a list"),
        ({}, "an object"),
        ("x" * 90, repr("x" * 80) + "..."),
        (b"x" * 90, repr(b"x" * 80) + "..."),
        ("short", "'short'"),
        (10**5000, "a number of more than 20 digits"),
        (None, "None"),
        (1.5, "1.5"),
    ):
        assert quoted(value) == said


def test_long_texts_in_messages_lose_their_middle() -> None:
    assert shortened("abc") == "abc"
    assert shortened("a\nb\x1b[31mc\u00e4") == r"a\nb\x1b[31mc\u00e4".replace(r"\u00e4", "\u00e4")
    assert shortened("a" * 300 + "b" * 300) == "a" * 200 + "..." + "b" * 200


def test_an_unknown_name_is_said_with_the_nearest_and_all_that_are_known() -> None:
    require_known("planner", "merge", ["merge", "wfbp"])
    require_known("type", "bf16", ["bfloat16"], also={"bf16": "bfloat16"})
    with pytest.raises(UserError) as caught:
        require_known("planner", "murge", {"merge": 1, "wfbp": 2}, where="recipe: ")
    said = "unknown planner 'murge'; did you mean 'merge'? (known: merge, wfbp)"
    assert str(caught.value) == f"recipe: {said}"
    assert unknown("planner", "zzz", ["merge"]) == "unknown planner 'zzz' (known: merge)"
    nearest = unknown("type", "fp15", ["float32"], also=["fp16"])
    assert nearest == "unknown type 'fp15'; did you mean 'fp16'? (known: float32)"
