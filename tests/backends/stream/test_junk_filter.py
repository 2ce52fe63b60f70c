"""Events that are no JSON object are taken out of a stream; what is held for it is bounded."""

from __future__ import annotations

from time import process_time

import pytest

from backends.stream.sse import JUDGED_LIMIT, JunkFilter

TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
LARGE = b'data: {"x":"%b"}\n\n' % (b"x" * 60_000)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_junk_is_left_out_wherever_reads_are_torn(end: bytes, size: int) -> None:
    stream = b"data: OK\n\n" + TOKEN + b": comment\n\ndata: {x\n\n" + FINISH + b"data: 5\n\n" + TOKEN + DONE
    stream, junk = stream.replace(b"\n", end), JunkFilter()
    passed = b"".join(junk.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + junk.close()
    assert passed == (TOKEN + b": comment\n\n" + FINISH + TOKEN + DONE).replace(b"\n", end)


def test_the_end_of_an_answer_is_held_until_it_is_known_to_be_whole() -> None:
    junk = JunkFilter()
    assert junk.feed(TOKEN + FINISH) == TOKEN
    assert junk.held_bytes == len(FINISH)
    assert junk.feed(DONE) == FINISH + DONE


def test_what_follows_the_end_is_held_up_to_a_limit() -> None:
    """A server may write for ever after its finish_reason."""
    junk, most = JunkFilter(), 0
    passed = len(junk.feed(b"data: OK\n\n" + FINISH))
    for _ in range(200):
        passed += len(junk.feed(LARGE))
        most = max(most, junk.held_bytes)
    assert most <= JUDGED_LIMIT
    assert passed == len(FINISH) + 200 * len(LARGE)
    assert junk.held_bytes == 0


def test_an_event_that_never_ends_is_held_up_to_a_limit() -> None:
    """In small reads too, each of which costs as much as the one before."""
    junk, read = JunkFilter(), b"x" * 100
    assert junk.feed(b"data: ") == b""
    began = process_time()
    passed = [junk.feed(read) for _ in range(JUDGED_LIMIT // 100 + 100)]
    assert sum(map(len, passed)) > JUDGED_LIMIT
    assert junk.held_bytes == 0
    assert process_time() - began < 60  # joined anew at each read, it would take minutes
