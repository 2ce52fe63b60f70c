"""The access log on a terminal: a short line per request."""

from __future__ import annotations

import json
import os
import pty
import re
from datetime import datetime
from typing import Any

import pytest

from gateway.observe.logs import AccessLog, terminal_line
from gateway.observe.record import STAGES, AttemptRecord, RequestOutcome
from policies.types import AttemptKind, AttemptOutcome
from tests.support.builders import record

HOSTILE = "a\r\nb\x1b[31mc\x7f\x9b31m\u2028\ud800é"


def shown(**known: Any) -> str:
    """The line without its time."""
    return terminal_line(record(**known)).decode("ascii").partition(" ")[2].removesuffix("\n")


def spent(**seconds: float) -> list[float | None]:
    return [seconds.get(stage.name.lower()) for stage in STAGES]


async def test_a_terminal_gets_short_lines_and_a_pipe_json() -> None:
    """Whatever name the terminal was opened by."""
    ours, theirs = pty.openpty()
    out, into = os.pipe()
    for target in (theirs, into):
        log = AccessLog(f"/dev/fd/{target}")
        log(record())
        log.close()
    assert os.read(ours, 4096).endswith(
        b"200 chat small/a first token 200 ms of 800 ms, 10 tokens in 1.00 s, req-1\r\n"
    )
    assert json.loads(os.read(out, 1 << 16))["request_id"] == "req-1"
    for each in (ours, theirs, out, into):
        os.close(each)


def test_the_time_is_that_of_the_arrival() -> None:
    """ISO 8601, to the millisecond, with the zone of the machine."""
    text = terminal_line(record(wall=1.7e9 + 0.25)).decode().partition(" ")[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.250[+-]\d\d:\d\d", text)
    assert datetime.fromisoformat(text).timestamp() == 1.7e9 + 0.25


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"stream": False}, "200 chat small/a 10 tokens in 1.00 s, req-1"),
        ({"ttft_budget": None}, "200 chat small/a first token 200 ms, 10 tokens in 1.00 s, req-1"),
        (
            {"ttft": 1.31, "total": 1.5, "spent": spent(queue=0.1, failover=1.1, stream=5.0)},
            "200 chat small/a first token 1.31 s of 800 ms, late by failover 1.10 s, 10 tokens in 1.50 s, req-1",
        ),
        (
            {"status": 404, "end": RequestOutcome.REFUSED, "error": "no model 'x'", "endpoint": "-", "pool": "-"}
            | {"ttft": None, "output_tokens": None, "total": 0.001, "route": "-"},
            "404 - - 1 ms, refused: no model 'x', req-1",
        ),
        (
            {"end": RequestOutcome.CLIENT_GONE, "error": ""},
            "200 chat small/a first token 200 ms of 800 ms, 10 tokens in 1.00 s, client_gone, req-1",
        ),
    ],
)
def test_a_line_has_the_figures_that_a_request_has(known: dict[str, Any], expected: str) -> None:
    """Of a late first token the longest stage before it."""
    assert shown(**known) == expected


def test_failed_attempts_are_named() -> None:
    """With endpoint and cause; attempts without a cause are not."""
    lost = AttemptRecord(
        1, AttemptKind.PRIMARY, "small/b", "small", 0.0, 0.1, AttemptOutcome.FAILED, cause="connection refused"
    )
    won = AttemptRecord(2, AttemptKind.FALLBACK, "small/a", "small", 0.1, 1.0, AttemptOutcome.COMPLETED)
    assert shown(attempts=[lost, won]).endswith("1.00 s, attempt 1 at small/b: connection refused, req-1")


def test_no_text_of_others_reaches_the_terminal_unescaped() -> None:
    """One line of printable ASCII, whatever a caller or a server sent."""
    for name in ("request_id", "error", "route", "endpoint"):
        line = terminal_line(record(**{name: HOSTILE}, **({"end": RequestOutcome.FAILED} if name == "error" else {})))
        assert line.endswith(b"\n")
        assert not [byte for byte in line[:-1] if not 0x20 <= byte <= 0x7E]
        assert b"\\x1b" in line
