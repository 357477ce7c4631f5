"""What a sentence tells, however it is worded."""

from __future__ import annotations


def assert_tells(text: str, *facts: str) -> None:
    """Check that the text holds these facts (names, numbers with units) in this order."""
    at = 0
    for fact in facts:
        found = text.find(fact, at)
        assert found >= 0, f"{fact!r} is not, or not there, in {text!r}"
        at = found + len(fact)
