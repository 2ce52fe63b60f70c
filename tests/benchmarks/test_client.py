"""The load generator of the benchmarks: its parsing of answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.client import TOKEN, BadAnswer, Connection, request
from benchmarks.engine import ANSWER, END, HEAD, ROLE, SHAPE
from benchmarks.engine import TOKEN as SENT

STREAM = HEAD + ROLE + SENT + SENT + END


class Wire(asyncio.Transport):
    """A transport which discards writes."""

    def write(self, data: Any) -> None:
        pass

    def abort(self) -> None:
        pass


def asked() -> Connection:
    connection = Connection()
    connection.connection_made(Wire())
    connection.ask(b"")
    return connection


@pytest.mark.parametrize("answer", [ANSWER, STREAM])
async def test_the_end_of_an_answer_is_found_at_any_split(answer: bytes) -> None:
    """A whole answer or a stream, cut at any byte; never too early."""
    for cut in range(1, len(answer)):
        connection = asked()
        assert connection.waiter is not None
        connection.data_received(answer[:cut])
        assert not connection.waiter.done()
        connection.data_received(answer[cut:])
        assert connection.waiter.done()


async def test_reads_that_brought_tokens_are_timed() -> None:
    """A role is none; the first is the TTFT."""
    connection = asked()
    for part in (HEAD + ROLE, SENT, SENT + SENT, END):
        connection.data_received(part)
    answer = connection.answer
    assert len(answer.reads) == 2
    assert answer.ttft == answer.reads[0] - answer.sent
    assert answer.gaps(answer.reads[0]) == [answer.reads[1] - answer.reads[0]]
    assert TOKEN in SENT


async def test_any_status_but_200_is_a_failure() -> None:
    """The result names the failure."""
    connection = asked()
    assert connection.waiter is not None
    connection.data_received(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\nno")
    with pytest.raises(BadAnswer, match="503"):
        connection.waiter.result()


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ("stream-10-5", (b"10", b"5", None)),
        ("stream-200-5-2000", (b"200", b"5", b"2000")),
        ("hose", (None, None, None)),
        ("whole", None),
    ],
)
def test_the_engine_reads_the_shape_that_the_load_asks_for(shape: str, groups: tuple[bytes | None, ...] | None) -> None:
    """The shape is in the prompt, which every router passes on."""
    found = SHAPE.search(request(shape, ["one", "two", "three"]))
    assert (found.groups() if found else None) == groups
