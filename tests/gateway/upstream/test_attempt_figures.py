"""Times and tokens of one attempt."""

from __future__ import annotations

import pytest

from backends.http.connection_pool import ConnectionPool
from backends.interface import HttpCall
from gateway.upstream.attempt import WireAttempt, WireState
from tests.support.attempt_stage import Stage
from tests.support.builders import ANSWER, DONE, FINISH, TOKEN, USAGE, WHOLE
from tests.support.upstream import STREAM_HEAD, Upstream, chunk, turn_until

pytestmark = pytest.mark.virtual_time

COMMENT = b": keep-alive\n\n"


async def test_connecting_and_sending_are_timed_separately() -> None:
    """A reused connection has no connect time; a new connection's lies between opened and sent."""
    async with Upstream([STREAM_HEAD + chunk(ANSWER) + b"0\r\n\r\n"]) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=1)
        seen: list[WireAttempt] = []
        for _ in range(2):
            stage = Stage(status=0)
            stage.wire.on_sent(await origin.open(HttpCall("POST", "/v1/chat/completions"), stage.sink))
            seen.append(stage.wire)
            await turn_until(lambda: seen[-1].state is WireState.OVER)
        await origin.close()
    fresh, reused = (each.times for each in seen)
    assert fresh.opened < fresh.connected <= (fresh.sent or 0)
    assert reused.opened == reused.connected <= (reused.sent or 0)


def test_the_engines_usage_is_reported() -> None:
    """Prompt, cached and completion tokens by the engine's count."""
    stage = Stage().reads(TOKEN, TOKEN, TOKEN, FINISH, USAGE, DONE).ends()
    report = stage.fleet.reports[0]
    assert (report.prompt_tokens, report.cached_tokens, report.completion_tokens) == (7, 4, 2)
    assert stage.wire.output_tokens == 2


def test_without_usage_content_chunks_are_counted() -> None:
    """Near enough for metering."""
    stage = Stage().reads(TOKEN, TOKEN, TOKEN, FINISH).ends()
    assert (stage.wire.output_tokens, stage.fleet.reports[0].completion_tokens) == (3, None)


def test_without_usage_an_event_with_more_text_than_a_token_counts_by_its_text() -> None:
    """Four bytes a token: an engine that writes eight tokens an event is metered by all of them."""
    several = TOKEN.replace(b"hi", b"x" * 32)
    assert several != TOKEN
    stage = Stage().reads(several, several, several).ends()
    assert stage.wire.output_tokens >= 2 * 8  # the form of the first event is learned


def test_the_engines_own_times_are_preferred() -> None:
    """Without the network in between."""
    timed = b'data: {"choices":[],"usage":{"completion_tokens":3},"metrics":{"mean_itl_ms":12.5,"queue_time_ms":20,"time_to_first_token_ms":80}}\n\n'  # noqa: E501
    report = Stage().reads(TOKEN, TOKEN, FINISH, timed).ends().fleet.reports[0]
    assert (report.mean_itl, report.engine_ttft) == (0.0125, 0.1)


def test_tpot_is_the_time_between_the_first_and_the_last_token() -> None:
    """Divided by the tokens after the first; later events do not count."""
    stage = Stage().reads(TOKEN, TOKEN, TOKEN)
    first, last = stage.wire.times.first_in, stage.wire.times.last_token
    assert first is not None
    stage.reads(FINISH, COMMENT).ends()
    assert stage.wire.tpot() == (last - first) / 2 == stage.fleet.reports[0].mean_itl


@pytest.mark.parametrize(("stream", "parts"), [(True, [TOKEN, FINISH]), (True, []), (False, [WHOLE])])
def test_tpot_needs_a_stream_of_two_tokens(stream: bool, parts: list[bytes]) -> None:
    """Otherwise there is no gap to measure."""
    assert Stage(stream=stream).reads(*parts).wire.tpot() is None
