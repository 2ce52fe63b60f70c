"""A race performs the actions of the attempt machine over real sockets. For decisions, see
tests/policies/attempts/test_attempt_machine.py."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest
import uvloop

from gateway.observe.record import Stage
from policies.attempts.budgets import RetryBudget
from policies.types import AttemptKind
from tests.support.builders import (
    ANSWER,
    PREAMBLE,
    STREAMED,
    WHOLE,
    route,
)
from tests.support.scripted_fleet import FAILS, OK, Fleet, Stalling, dead_url, opened
from tests.support.simulated import eventually
from tests.support.upstream import GATE, HANG, RESET, STREAM_HEAD, Pause, Script, chunk, reply

pytestmark = pytest.mark.virtual_time

# --------------------------------------------------------------------------- the first token


async def test_the_first_candidate_is_tried_and_its_first_token_written() -> None:
    """No other endpoint receives the request; buffered bytes are written with the head."""
    async with Fleet(OK, OK) as fleet:
        run = await fleet.open()
        assert (run.attempt.candidate.endpoint.id, run.attempt.kind) == ("small/0", AttemptKind.PRIMARY)
        assert fleet.wire.writes[0].endswith(b"\r\n\r\n" + chunk(ANSWER))
        assert (fleet.asked, fleet.lost) == ([1, 0], [])
        assert (fleet.record.endpoint.id, fleet.record.answer.model) == ("small/0", "served")
        assert {Stage.CONNECT, Stage.SEND, Stage.UPSTREAM, Stage.RELAY} <= set(fleet.record.stages)


async def test_an_attempt_counts_as_load_from_its_opening() -> None:
    """Before the connection: otherwise a burst would herd onto one engine."""
    async with Fleet([GATE, STREAMED]) as fleet:
        task = asyncio.create_task(fleet.open())
        await opened()
        load = fleet.fleet.loads()["small/0"]
        assert (load.in_flight, load.prefilling, fleet.upstreams[0].connections) == (1, 1, 0)
        assert 0 < load.queued_tokens <= 100
        fleet.upstreams[0].proceed()
        await task
        assert fleet.fleet.loads()["small/0"].queued_tokens == 0


async def test_the_backend_receives_its_model_name_key_and_output_limit() -> None:
    """The caller's request id is not sent."""
    async with Fleet(OK) as fleet:
        await fleet.open(limits={"output_tokens": 99})
        (sent,) = fleet.upstreams[0].requests
    assert (sent.method, sent.target) == ("POST", "/v1/chat/completions")
    assert sent.headers["authorization"] == "Bearer sk-backend"
    assert "req-1" not in sent.headers["x-request-id"]
    body = json.loads(sent.body)
    assert (body["model"], body["max_tokens"]) == ("served", 99)


async def test_a_passthrough_keeps_the_callers_model_name() -> None:
    """In the Record too, if safe in a header."""
    async with Fleet(OK) as fleet:
        await fleet.open(model="chat")
        assert json.loads(fleet.upstreams[0].requests[0].body)["model"] == "chat"
        assert fleet.record.answer.model == "chat"


async def test_the_fleet_receives_the_tpot_budget_and_expected_output() -> None:
    """Seconds per token, the tighter of the route's and the caller's; and the expected output tokens."""
    async with Fleet(OK) as fleet:
        told: list[tuple[object, object]] = []
        sent = fleet.fleet.on_sent
        fleet.fleet.on_sent = lambda *a, **how: (told.append((how["tpot_budget"], how["output"])), sent(*a, **how))  # type: ignore
        for headers in ({}, {"x-slo-tpot-ms": "20"}, {"x-llm-d-slo-tpot-ms": "80"}):
            await fleet.open(headers=headers, tpot={"budget": "50ms"})
        await fleet.open(tpot="off")
    assert told == [(0.05, 256), (0.02, 256), (0.05, 256), (None, 256)]


async def test_priority_scheduling_gets_the_deadline() -> None:
    """As Unix time in ms, in place of the caller's value. A request without a deadline comes last."""
    async with Fleet(OK) as fleet:
        fleet.ways["small/0"] = replace(fleet.ways["small/0"], priority=True)
        before = time.time()
        await fleet.open(within=2.0, body={"priority": -5})
        await fleet.open()
        due, never = (json.loads(sent.body)["priority"] for sent in fleet.upstreams[0].requests)
    assert before + 1.999 <= due / 1e3 <= time.time() + 2.0
    assert due < never < 2**63


async def test_without_priority_scheduling_the_callers_priority_is_kept() -> None:
    """Its meaning is the engine's."""
    async with Fleet(OK, OK) as fleet:
        await fleet.open(within=2.0, body={"priority": -5})
        await fleet.open(within=2.0)
        bodies = [json.loads(sent.body) for sent in fleet.upstreams[0].requests]
    assert [body.get("priority") for body in bodies] == [-5, None]


@pytest.mark.parametrize("how", [OK, [reply(b"{}", "400 x")]])
async def test_on_dispatched_is_called_at_dispatch(how: Script) -> None:
    """Before the caller's first token, and no second time at any end."""
    async with Fleet([GATE, *how]) as fleet:
        heard: list[int] = []
        fleet.dispatcher.on_dispatched = lambda request: heard.append(fleet.fleet.loads()["small/0"].in_flight)
        task = asyncio.create_task(fleet.open())
        await opened()
        assert heard == [1]
        fleet.upstreams[0].proceed()
        await asyncio.gather(task, return_exceptions=True)
        assert len(heard) == 1


# --------------------------------------------------------------------------- failures


@pytest.mark.parametrize("how", FAILS)
async def test_a_failure_before_the_first_token_falls_back(how: str) -> None:
    """To the next candidate at once. The Record shows the lost attempt, and its time as a stage."""
    async with Fleet(FAILS[how], OK) as fleet:
        run = await fleet.open()
        assert (run.attempt.candidate.endpoint.id, run.attempt.kind) == ("small/1", AttemptKind.FALLBACK)
        ending = {"answers 503": "rate_limited", "answers 401": "misconfigured"}.get(how, "failed")
        assert fleet.lost == [("small/0", "primary", ending)]
        assert Stage.FAILOVER in fleet.record.stages
        assert (fleet.record.endpoint.id, fleet.open_attempts[0]) == ("small/1", 0)


async def test_a_refused_connection_falls_back() -> None:
    """No byte was sent, so no token was billed."""
    async with Fleet(dead_url(), OK) as fleet:
        assert (await fleet.open()).attempt.candidate.endpoint.id == "small/1"
        assert fleet.lost == [("small/0", "primary", "failed")]
        assert fleet.fleet.reports[0].connected is False


HALFWAY: Script = [STREAM_HEAD + chunk(PREAMBLE), RESET]


@pytest.mark.parametrize(
    ("stream", "first", "asked"),
    [
        (True, HALFWAY, [1, 1, 0]),  # accepted: vLLM sends 200 before the computation
        (True, [RESET], [1, 1, 1]),  # no sign of acceptance: a proxy without an engine resets too
        (False, [RESET], [1, 1, 0]),  # a whole answer has no earlier sign of acceptance
    ],
)
async def test_a_request_accepted_by_two_dead_endpoints_is_given_up(
    stream: bool, first: Script, asked: list[int]
) -> None:
    """The request may be the cause."""
    async with Fleet(first, first, OK if stream else [reply(WHOLE)]) as fleet:
        if asked[2]:
            assert (await fleet.open(stream=stream)).attempt.number == 3
        else:
            assert (await fleet.refused(stream=stream)).status == 502
        assert fleet.asked == asked


async def test_every_attempt_has_its_own_upstream_id() -> None:
    """In the Record too. An engine may refuse a known id, and its log names the id alone."""
    async with Fleet([reply(b"{}", "500 x")], OK) as fleet:
        won = await fleet.open()
        first, second = (u.requests[0].headers["x-request-id"] for u in fleet.upstreams)
        assert first != second
        assert [each.upstream_id for each in fleet.record.attempts] == [first, second]
        assert won.request.request_id == second


async def test_a_request_error_is_not_retried() -> None:
    """The error reaches the caller in the backend's words."""
    wrong = b'{"error":{"message":"bad temperature","type":"invalid_request_error","param":"temperature","code":"odd"}}'
    async with Fleet([reply(wrong, "400 x")], OK) as fleet:
        refusal = await fleet.refused()
        assert (refusal.status, refusal.message, refusal.param, refusal.code, refusal.headers) == (
            400,
            "bad temperature",
            "temperature",
            "odd",
            {},
        )
        assert (fleet.asked, fleet.lost) == ([1, 0], [("small/0", "primary", "refused")])


async def test_after_the_last_failure_the_caller_gets_its_error() -> None:
    """Every attempt is in the Record, and none remains in flight."""
    async with Fleet(dead_url(), [reply(b"{}", "500 x")]) as fleet:
        refusal = await fleet.refused()
        assert (refusal.status, refusal.message) == (502, "The backend failed.")
        assert refusal.headers == {"x-should-retry": "false"}
        assert [endpoint for endpoint, _, _ in fleet.lost] == ["small/0", "small/1"]
        assert fleet.open_attempts == [0, 0]


async def test_attempts_are_bounded_by_the_route() -> None:
    """At any number of candidates."""
    async with Fleet(*[[reply(b"{}", "500 x")]] * 4) as fleet:
        await fleet.refused(max_attempts=2)
        assert fleet.asked == [1, 1, 0, 0]


async def test_an_overload_reply_uses_the_retry_budget_and_a_lost_connection_does_not() -> None:
    """Retries add load to an overloaded fleet; a lost connection did no work."""
    none = RetryBudget(burst=0)
    async with Fleet([reply(b"{}", "503 x")], OK, retries=none) as fleet:
        refusal = await fleet.refused()
        assert (refusal.status, fleet.asked) == (503, [1, 0])
    async with Fleet([RESET], OK, retries=none) as fleet:
        assert (await fleet.open()).attempt.number == 2
    assert (none.active, none.retrying) == (0, 0)


async def test_a_retry_returns_its_budget_at_the_end() -> None:
    """For any end of the request."""
    budget = RetryBudget()
    async with Fleet([reply(b"{}", "503 x")], [GATE, STREAMED], retries=budget) as fleet:
        task = asyncio.create_task(fleet.open())
        await eventually(lambda: fleet.asked == [1, 1])
        assert (budget.active, budget.retrying) == (1, 1)
        fleet.upstreams[1].proceed()
        await task
        assert (budget.active, budget.retrying) == (0, 0)


async def test_the_only_endpoint_is_retried_after_its_retry_after() -> None:
    """Once."""
    async with Fleet(OK) as fleet:
        fleet.upstreams[0]._scripts = ([reply(b"{}", "429 x", "retry-after: 0.2")], OK)
        start = monotonic()
        assert (await fleet.open()).attempt.number == 2
        assert monotonic() - start >= 0.2
        assert fleet.lost == [("small/0", "primary", "rate_limited")]


# --------------------------------------------------------------------------- silence


async def test_a_silent_stream_is_abandoned_for_the_next_candidate() -> None:
    """In time for the deadline; the connection to the silent engine is closed."""
    async with Fleet([STREAM_HEAD, HANG], OK) as fleet:
        assert (await fleet.open(within=0.6)).attempt.number == 2
        assert fleet.lost == [("small/0", "primary", "silent")]
        await fleet.upstreams[0].until(lambda seen: seen.hangups == 1)


async def test_a_whole_answer_is_waited_for() -> None:
    """Silence is no evidence for an answer that arrives at its end, past the deadline and the first-token limit."""
    async with Fleet([Pause(0.3), reply(WHOLE)], OK, limit=0.1) as fleet:
        run = await fleet.open(stream=False, within=0.2)
        assert (run.attempt.number, fleet.asked) == (1, [1, 0])


async def test_every_stream_attempt_ends_after_the_first_token_limit() -> None:
    """Without a budget too: 504."""
    async with Fleet([STREAM_HEAD, HANG], limit=0.1) as fleet:
        refusal = await fleet.refused()
        assert (refusal.status, refusal.code) == (504, "timeout")
        assert refusal.message == "No backend answered in time: no first token within 0.1 s."
        assert fleet.lost == [("small/0", "primary", "silent")]


async def test_a_hedge_races_a_silent_attempt_and_the_loser_is_cancelled() -> None:
    """The first content wins, a preamble does not; the other engine stops at once."""
    async with Fleet([STREAM_HEAD + chunk(PREAMBLE), HANG], OK) as fleet:
        run = await fleet.open(within=0.6, hedge={"max_extra": 1.0})
        assert (run.attempt.kind, run.attempt.candidate.endpoint.id) == (AttemptKind.HEDGE, "small/1")
        assert fleet.lost == [("small/0", "primary", "cancelled")]
        await fleet.upstreams[0].until(lambda seen: seen.hangups == 1)


async def test_a_losing_hedge_is_cancelled() -> None:
    """At the first token of the primary attempt."""
    async with Fleet([STREAM_HEAD, GATE, chunk(ANSWER) + b"0\r\n\r\n"], [STREAM_HEAD, HANG]) as fleet:
        task = asyncio.create_task(fleet.open(within=0.8, hedge={"max_extra": 1.0}))
        await eventually(lambda: fleet.asked == [1, 1])
        fleet.upstreams[0].proceed()
        assert (await task).attempt.kind is AttemptKind.PRIMARY
        assert fleet.lost == [("small/1", "hedge", "cancelled")]
        await fleet.upstreams[1].until(lambda seen: seen.hangups == 1)


async def test_hedges_use_the_budget_of_their_route() -> None:
    """Half a request's share buys no hedge: the silent attempt is abandoned, and the share accumulates."""
    async with Fleet([STREAM_HEAD, HANG], OK) as fleet:
        half: dict[str, Any] = {"hedge": {"max_extra": 0.5}, "within": 0.6}
        assert (await fleet.open(**half)).attempt.kind is AttemptKind.FALLBACK
        assert (await fleet.open(**half)).attempt.kind is AttemptKind.HEDGE
        assert (await fleet.open(**half)).attempt.kind is AttemptKind.FALLBACK


async def test_a_hedge_is_taken_only_when_it_is_sent() -> None:
    """The timer may find no further candidate."""
    async with Fleet([STREAM_HEAD, HANG], limit=0.1) as fleet:
        hedging: dict[str, Any] = {"hedge": {"max_extra": 1.0}}
        await fleet.refused(**hedging)
        hedged = route(**hedging)
        assert fleet.dispatcher.hedges[hedged.name, hedged.hedge_share].try_take()
        assert not fleet.dispatcher.hedges[hedged.name, hedged.hedge_share].try_take()


async def test_a_reload_keeps_the_hedge_budget_of_a_route_whose_share_is_unchanged() -> None:
    """A changed share or a removed route starts an empty budget."""
    async with Fleet(OK) as fleet:
        kept, changed, dropped = (route(name, hedge={"max_extra": 0.5}) for name in ("kept", "changed", "dropped"))
        before = [fleet.dispatcher.hedges[each.name, each.hedge_share] for each in (kept, changed, dropped)]
        after = route("changed", hedge={"max_extra": 0.25})
        fleet.dispatcher.reload([kept, after])
        found = [fleet.dispatcher.hedges[each.name, each.hedge_share] for each in (kept, after, dropped)]
        assert [one is other for one, other in zip(before, found, strict=True)] == [True, False, False]


def test_a_blocked_event_loop_does_not_count_as_silence() -> None:
    """A token that waits in the socket when the timer fires late is read first. (uvloop runs timers first.)"""

    async def story() -> tuple[int, list[int]]:
        server = await asyncio.get_running_loop().create_server(Stalling, "127.0.0.1", 0)
        async with Fleet(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", OK) as fleet:
            run = await fleet.open(within=0.6)
            server.close()
            return run.attempt.number, fleet.asked

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(story()) == (1, [0])
