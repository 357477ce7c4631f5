from __future__ import annotations

from syncline.errors import quoted, shortened


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
