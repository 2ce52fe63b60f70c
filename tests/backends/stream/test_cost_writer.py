"""The cost in the usage of a stream: added to one member, nothing else is touched."""

from __future__ import annotations

import json

import pytest

from backends.stream.cost_writer import CostWriter

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":5}}\n\n'
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"\\"usage\\": {\\"cost\\": 9}"}}],"usage":null}\n\n'


def rewritten(*parts: bytes, cost: float = 0.00012) -> bytes:
    writer = CostWriter(lambda: cost)
    return b"".join(map(writer.feed, parts)) + writer.close()


def test_usage_gets_the_cost_and_all_else_stays() -> None:
    found = rewritten(TEXT + USAGE + b"data: [DONE]\n\n")
    assert found == TEXT + USAGE.replace(b'"usage":{', b'"usage":{"cost":0.00012000,') + b"data: [DONE]\n\n"
    usage = json.loads(found.split(b"\n\n")[1].removeprefix(b"data: "))["usage"]
    assert usage == {"cost": 0.00012, "prompt_tokens": 10, "completion_tokens": 5}


@pytest.mark.parametrize("cut", range(1, len(USAGE)))
def test_an_event_torn_anywhere_gets_it_too(cut: int) -> None:
    assert rewritten(USAGE[:cut], USAGE[cut:]) == rewritten(USAGE)


@pytest.mark.parametrize(
    "event",
    [
        TEXT,
        b'data: {"usage":{"cost":0.5,"prompt_tokens":1}}\n\n',
        b'data: {"usage":{}}\n\n',
        b'data: {"usage":null}\n\n',
        b'data: {"usage":{"prompt_tokens":1},"choices":[{"usage":{"prompt_tokens":1}}]}\n\n',
        b'data: {"usage":{"prompt_tokens":"many"}}\n\n',
        b'data: {"usage":{ junk\n\n',
        b': "usage":{ a comment\n\n',
        b"data: " + b"[" * 5000 + b'"usage":{' + b"\n\n",
    ],
)
def test_an_event_that_has_no_place_for_it_passes_unchanged(event: bytes) -> None:
    """The server's own cost, no counts, two members of the name, no JSON."""
    assert rewritten(event) == event


def test_no_cost_is_written_where_none_is_known() -> None:
    assert rewritten(USAGE, cost=0.0) == USAGE
