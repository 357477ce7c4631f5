"""Errors of torch's backends in words for the user."""

from __future__ import annotations

import pytest

from syncline.errors import MismatchError, PeerError
from syncline.train.measure.exchange import describe_error, telling_lost_peers
from tests.workers import WorkerPool

CLOSED = (
    "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:5703. This is typically caused by a remote worker crashing. Check its logs."
)
SILENT = (
    "[/build/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation "
    "to complete"
)


@pytest.mark.parametrize(
    ("text", "timeout_s", "said"),
    [
        (CLOSED, None, "Connection closed by peer [127.0.0.1]:5703"),
        (CLOSED, 5.0, "Connection closed by peer [127.0.0.1]:5703"),
        (SILENT, None, "Timed out waiting 5000ms for recv operation to complete"),
        (
            SILENT,
            5.0,
            "no answer within 5 s (Timed out waiting 5000ms for recv operation to complete)",
        ),
        (
            "Application timeout caused pair closure",
            0.5,
            "no answer within 0.5 s (Application timeout caused pair closure)",
        ),
        ("first\nsecond", None, "first"),
        ("", None, "RuntimeError"),
    ],
)
def test_what_is_said(text: str, timeout_s: float | None, said: str) -> None:
    assert describe_error(RuntimeError(text), timeout_s) == said


def tell(text: str) -> list[str]:
    try:
        with telling_lost_peers("in a test"):
            raise RuntimeError(text)
    except RuntimeError as error:
        return [type(error).__name__, str(error)]


def test_a_lost_peer_is_told(workers: WorkerPool) -> None:
    (told,) = workers.run(tell, 1, CLOSED)
    assert told == [
        "PeerError",
        "rank 0 lost a peer in a test: Connection closed by peer [127.0.0.1]:5703; see the other "
        "ranks' output, and resume all ranks from the last checkpoint",
    ]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), MismatchError("x"), PeerError("y")],
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, telling_lost_peers("in a test"):
        raise error
    assert caught.value is error
