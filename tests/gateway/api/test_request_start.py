"""The time at which a request was sent, before it came here."""

from __future__ import annotations

from pathlib import Path
from time import time

import pytest

from gateway.api.request_headers import LONGEST_WAY, sent_at, sent_before
from gateway.observe.record_columns import RECORD
from tests.support.builders import CHAT, STREAMED, calling, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import Upstream

AT = 1_795_475_103.438


@pytest.mark.parametrize(
    "text", ["t=1795475103.438", "1795475103.438", "t=1795475103438", "1795475103438", " t=1795475103438000 "]
)
def test_seconds_milliseconds_and_microseconds_are_told_apart_by_size(text: str) -> None:
    """As nginx, Heroku and Apache write them."""
    assert sent_at(text) == pytest.approx(AT, abs=1e-6)


@pytest.mark.parametrize(
    "text", [None, "", "now", "t=", "-5", "1e9", "t=123", "9" * 17, "1795475103,438", "١٧٩٥٤٧٥١٠٣", "nan", "t=" * 9000]
)
def test_what_is_no_time_is_ignored(text: str | None) -> None:
    """A wrong header never fails a request."""
    assert sent_at(text) is None


def test_a_time_in_the_future_or_long_ago_is_ignored() -> None:
    """The clock of the sender is wrong, or somebody kept the header."""
    assert sent_before(None, AT) is None
    assert sent_before(AT, AT - 0.001) is None
    assert sent_before(AT, AT + LONGEST_WAY + 1) is None
    assert sent_before(AT, AT + 0.25) == pytest.approx(0.25)


async def test_a_record_has_the_time_since_the_request_was_sent(tmp_path: Path) -> None:
    """From the header to the JSON; none without the header."""
    async with Upstream(*[[STREAMED]] * 2) as engine, running({"a": pool(engine.url)}) as gateway:
        for number, lines in enumerate(([], [f"x-request-start: t={time() - 2:.3f}"]), 1):
            async with calling(gateway.url) as caller:
                await caller.ask(post({**CHAT, "stream": True}, "connection: close", *lines))
                await caller.rest()
            await eventually(lambda number=number: len(gateway.recorder.recent) == number)
        without, sent = (RECORD.view(each)["sent_before_ms"] for each in gateway.recorder.recent)
    assert without is None
    assert 1_900 < sent < 60_000
    assert last(gateway).asked.sent_before is not None
