"""A request with its route and decision: usage, and the limits for its attempts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from backends.http.connection_pool import ConnectionPool
from gateway.observe.timeline import RequestTimeline
from gateway.upstream.routed_request import WHOLE_ANSWER, RoutedRequest
from gateway.upstream.routed_request import Upstream as Target
from policies.types import AttemptOutcome, PoolEstimate, Price, PromptEstimate
from tests.support.builders import FINISH, TOKEN, USAGE, backend, decided, record, request, route
from tests.support.relay_fixture import Relaying


def routed(*, on: dict[str, Any] | None = None, output: int = 10, **body: Any) -> RoutedRequest:
    """`on`: settings of the route."""
    return RoutedRequest(
        request=request(**body),
        route=route(**{"upstream_stream": "off", **(on or {})}),
        estimate=PromptEstimate({"small": PoolEstimate(100)}, output),
        decision=decided(),
        timeline=RequestTimeline(record()),
        upstreams={"small/a": Target(ConnectionPool("http://127.0.0.1:9", connect_timeout=1.0), backend(), "served")},
        first_token_limit=5.0,
        idle=7.0,
    )


@pytest.mark.parametrize(
    ("stream", "wants", "strip"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_usage_is_hidden_only_in_streams_without_include_usage(stream: bool, wants: bool, strip: bool) -> None:
    """Whole answers keep usage in the body."""
    assert routed(stream=stream, stream_options={"include_usage": wants}).hides_usage is strip


@pytest.mark.parametrize(("parts", "tokens"), [([TOKEN, TOKEN, FINISH, USAGE], 7), ([TOKEN, TOKEN, FINISH], 100)])
async def test_cost_and_tokens_use_reported_usage(parts: list[bytes], tokens: int) -> None:
    """Without a report, the estimate; an attempt still open is ended."""
    talk = Relaying(*parts)
    await talk.to(price=Price(1.0, 10.0))
    talk.running.cancel()
    await asyncio.wait([talk.running])
    found = talk.life.record
    assert talk.fleet.endings == [AttemptOutcome.CANCELLED]
    assert [a.ending for a in found.attempts] == [AttemptOutcome.CANCELLED]
    assert (found.answer.output_tokens, found.answer.prompt_tokens) == (2, 7 if tokens == 7 else None)
    assert found.cost_usd == pytest.approx((tokens + 20) / 1e6)


def test_the_limits_of_a_stream() -> None:
    """Tokens are seen, so the first one is what is waited for."""
    limits = routed(stream=True, on={"max_attempts": 5}).limits
    assert (limits.stream, limits.first_token_limit, limits.idle, limits.max_attempts) == (True, 5.0, 7.0, 5)


def test_a_whole_answer_has_the_time_of_the_sdks() -> None:
    limits = routed(stream=False).limits
    assert (limits.stream, limits.first_token_limit) == (False, WHOLE_ANSWER)


def test_the_limit_of_the_whole_answer_counts_from_the_arrival() -> None:
    """Time in the queue is part of it."""
    assert routed(stream=True, on={"total": {"budget": "20s", "limit": "30s"}}).limits.limit_at == 100.0 + 30.0


@pytest.mark.parametrize(
    ("body", "cap", "longest"),
    [({}, None, 10), ({"max_tokens": 50}, None, 50), ({"max_tokens": 50}, 20, 20), ({"max_tokens": 5}, 20, 5)],
)
def test_the_longest_output_is_the_least_of_the_limits(body: dict[str, Any], cap: int | None, longest: int) -> None:
    """Without any, the estimate."""
    on = {} if cap is None else {"limits": {"output_tokens": cap}}
    assert routed(on=on, **body).limits.longest_output == longest


@pytest.mark.parametrize(
    ("body", "on", "assembled"),
    [
        ({}, {}, False),
        ({}, {"upstream_stream": "auto"}, False),
        ({}, {"upstream_stream": "auto", "total": {"budget": "9s"}}, True),
        ({}, {"upstream_stream": "off", "total": {"budget": "9s"}}, False),
        ({"stream": True}, {"upstream_stream": "auto"}, False),
    ],
)
def test_a_whole_answer_is_asked_for_as_a_stream_where_that_is_of_use(
    body: dict[str, Any], on: dict[str, Any], assembled: bool
) -> None:
    """So its tokens are seen: the first one has a limit, and silence shows something."""
    found = routed(on=on, **body)
    assert found.assembled is assembled
    assert found.limits.stream is (assembled or "stream" in body)
