"""Errors of torch's backends in words for the user."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from syncline.errors import MismatchError, PeerError
from syncline.train.measure.exchange import describe_error, telling_lost_peers
from tests.words import assert_tells

CLOSED = (
    "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:5703. This is typically caused by a remote worker crashing. Check its logs."
)
WHO = "Connection closed by peer [127.0.0.1]:5703"
SILENT = "Timed out waiting 5000ms for recv operation to complete"
PAIR = "Application timeout caused pair closure"


@pytest.mark.parametrize(
    ("text", "timeout_s", "said"),
    [
        (CLOSED, None, WHO),
        (CLOSED, 5.0, WHO),
        (f"[/build/gloo/transport/tcp/unbound_buffer.cc:78] {SILENT}", None, SILENT),
        (SILENT, 5.0, f"no answer within 5 s ({SILENT})"),
        (PAIR, 0.5, f"no answer within 0.5 s ({PAIR})"),
        ("first\nsecond", None, "first"),
        ("", None, "RuntimeError"),
    ],
)
def test_what_is_said(text: str, timeout_s: float | None, said: str) -> None:
    assert describe_error(RuntimeError(text), timeout_s) == said


def test_a_lost_peer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(PeerError) as caught, telling_lost_peers("in a test"):
        raise RuntimeError(CLOSED)
    assert_tells(str(caught.value), "rank 3", "in a test", WHO, "checkpoint")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), MismatchError("x"), PeerError("y")],
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, telling_lost_peers("in a test"):
        raise error
    assert caught.value is error
