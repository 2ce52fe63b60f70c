"""From a request to a decision: parsing, estimates, and the inputs of policies."""

from __future__ import annotations

import json
from dataclasses import fields
from time import monotonic

import pytest

from backends.interface import Operation
from gateway.admission.auth import ANYONE, Tenant
from gateway.api.api_error import ApiError
from gateway.decider import LARGE, MANY, Decider
from gateway.observe.record import RequestOutcome
from gateway.strict_json import decode, encode
from gateway.tokenize.estimator import Estimator, TokenizerConfig
from policies.fleet.fleet import AttemptReport, Fleet
from policies.queue.queued_request import QueuedRequest
from policies.types import AttemptOutcome, Endpoint, Placement, Pool, PoolEstimate, Price, PromptEstimate, RequestView
from tests.support.builders import candidate, record, request, route

pytestmark = pytest.mark.virtual_time

PRICE = Price(1.0, 2.0)
POOLS = [
    Pool("small", "served", (Endpoint("small/a", "small"), Endpoint("small/b", "small")), price=PRICE),
    Pool("large", "served", (Endpoint("large/c", "large"),), context_window=10),
]
BOTH = route(tiers=["large", "small"], ttft={"budget": "5s"})


@pytest.fixture
def decider() -> Decider:
    fleet = Fleet(POOLS)
    estimator = Estimator({"small": TokenizerConfig(), "large": TokenizerConfig()}, fleet.token_scale)
    return Decider(estimator, fleet)


def down(decider: Decider, *endpoints: str) -> None:
    for endpoint in endpoints:
        for _ in range(2):
            decider.fleet.on_probe_failed(endpoint, monotonic())


# --------------------------------------------------------------------------- the request


@pytest.mark.parametrize(
    ("size", "messages", "threads"), [(10, 1, 0), (100, MANY // 2, 0), (LARGE, 1, 1), (10, 2 * MANY, 1)]
)
async def test_large_requests_are_parsed_in_a_thread(decider: Decider, size: int, messages: int, threads: int) -> None:
    """A large body, or a body of many objects: each message costs as much as 500 bytes."""
    ran: list[object] = []
    submit = decider.estimator.executor.submit
    decider.estimator.executor.submit = lambda *task: ran.append(task) or submit(*task)  # type: ignore[method-assign]
    body = {"model": "chat", "messages": [{"role": "user", "content": "x" * size}] * messages}
    found = await decider.parse(Operation.CHAT, json.dumps(body).encode(), {}, 1.0, "req-1")
    assert (len(ran), found.user_turns) == (threads, messages)


@pytest.mark.parametrize("size", [10, LARGE])
async def test_a_request_parsed_in_a_thread_is_equal(decider: Decider, size: int) -> None:
    """Threads keep the event loop free for other requests."""
    body = {"model": "chat", "messages": [{"role": "user", "content": "x" * size}], "n": 2}
    raw = json.dumps(body).encode()
    found = await decider.parse(Operation.CHAT, raw, {"x-priority": "3"}, 1.0, "req-1")
    assert (found.model, found.priority, found.arrival, found.request_id, found.size) == (
        "chat",
        3,
        1.0,
        "req-1",
        len(raw),
    )
    assert decode(encode(found.body)) == body


@pytest.mark.parametrize("size", [10, LARGE])
async def test_a_refusal_from_a_thread_is_equal(decider: Decider, size: int) -> None:
    """It reaches the caller from a thread too."""
    raw = json.dumps({"model": "chat", "messages": [], "padding": "x" * size}).encode()
    with pytest.raises(ApiError, match="'messages': expected 'array' of length >= 1"):
        await decider.parse(Operation.CHAT, raw, {}, 1.0, "req-1")


# --------------------------------------------------------------------------- the estimate


async def test_a_prompt_is_estimated_for_every_pool_of_its_route(decider: Decider) -> None:
    """And for no other pool."""
    found = await decider.estimate(request(), BOTH, ANYONE)
    assert set(found.pools) == {"small", "large"}
    assert found.pools["small"].tokens > 0
    assert set((await decider.estimate(request(), route(), ANYONE)).pools) == {"small"}


async def test_the_expected_output_is_learned_per_route(decider: Decider) -> None:
    """From completed answers only; never above max_tokens."""
    before = (await decider.estimate(request(), BOTH, ANYONE)).output_tokens
    for end in (RequestOutcome.CLIENT_GONE, RequestOutcome.UPSTREAM_BROKE, RequestOutcome.FAILED):
        decider.learn(record(end=end, output_tokens=3))
    decider.learn(record(output_tokens=None))
    decider.learn(record(output_tokens=0))
    decider.learn(record(route="other", output_tokens=3))
    assert (await decider.estimate(request(), BOTH, ANYONE)).output_tokens == before
    for _ in range(200):
        decider.learn(record(output_tokens=40))
    assert (await decider.estimate(request(), BOTH, ANYONE)).output_tokens == pytest.approx(40, abs=5)
    assert (await decider.estimate(request(max_tokens=7), BOTH, ANYONE)).output_tokens <= 7


async def test_cache_groups_share_no_prefix(decider: Decider) -> None:
    """Block hashes differ between cache groups: a hit would reveal another group's prompts."""
    long = request(messages=[{"role": "user", "content": "word " * 100}])
    blocks = [
        tuple((await decider.estimate(long, BOTH, Tenant(name, cache_group=group))).pools["small"].blocks.hashes)
        for name, group in (("one", "web"), ("two", "web"), ("three", "lab"), ("anyone", ""))
    ]
    assert blocks[0] == blocks[1]
    assert len(set(blocks)) == 3


# --------------------------------------------------------------------------- the decision


async def test_a_decision_uses_the_current_snapshot(decider: Decider) -> None:
    """Tiers too small for the prompt and endpoints that are down are rejected."""
    inference = request()
    estimate = await decider.estimate(inference, BOTH, ANYONE)
    before = monotonic()
    decision = decider.decide(inference, BOTH, estimate, ANYONE, 1)
    assert decision.outcome is Placement.PLACE
    assert before <= decision.at <= monotonic()
    assert decision.deadline == inference.arrival + 5.0
    assert {c.endpoint.id for c in decision.ranked} == {"small/a", "small/b"}
    down(decider, "small/a")
    assert [c.endpoint.id for c in decider.decide(inference, BOTH, estimate, ANYONE, 1).ranked] == ["small/b"]


async def test_the_sequence_number_breaks_ties(decider: Decider) -> None:
    """A repeated decision with an equal sequence number is equal."""
    inference = request()
    estimate = await decider.estimate(inference, BOTH, ANYONE)
    firsts = [
        decider.decide(inference, BOTH, estimate, ANYONE, i).ranked[0].endpoint.id for i in [*range(20), *range(20)]
    ]
    assert set(firsts) == {"small/a", "small/b"}
    assert firsts[:20] == firsts[20:]


async def test_a_burst_is_spread_over_equal_engines(decider: Decider) -> None:
    """Sent prompts count as load at once: twenty requests without any answer divide evenly."""
    inference = request(messages=[{"role": "user", "content": "word " * 2000}])
    estimate = await decider.estimate(inference, BOTH, ANYONE)
    for i in range(20):
        chosen = decider.decide(inference, BOTH, estimate, ANYONE, 1).ranked[0]
        decider.fleet.on_sent(i, chosen, PoolEstimate(2000), monotonic(), stream=True)
    assert sorted(
        load.in_flight for id, load in decider.fleet.snapshot(monotonic()).loads.items() if id != "large/c"
    ) == [10, 10]


def test_a_gateway_is_usable_while_any_endpoint_is_usable(decider: Decider) -> None:
    """A probing endpoint counts: the next request tries the endpoint."""
    assert decider.any_usable(monotonic())
    down(decider, "small/a", "small/b")
    assert decider.any_usable(monotonic())
    down(decider, "large/c")
    assert not decider.any_usable(monotonic())
    decider.fleet.on_probe_answered("large/c", monotonic())
    assert decider.any_usable(monotonic())


def test_an_endpoint_that_fails_its_requests_is_not_usable(decider: Decider) -> None:
    """Failed attempts count like failed probes."""
    for endpoint in ("small/a", "small/b", "large/c"):
        for i in range(5):
            key, now = (endpoint, i), monotonic()
            decider.fleet.on_sent(key, candidate(endpoint), PoolEstimate(1), now, stream=True)
            decider.fleet.on_ended(key, AttemptOutcome.FAILED, now, AttemptReport())
    assert not decider.any_usable(monotonic())


# --------------------------------------------------------------------------- inputs of policies


@pytest.mark.parametrize(
    ("requested", "cap", "known"), [(None, None, None), (5, None, 5), (None, 9, 9), (5, 9, 5), (12, 9, 9)]
)
def test_max_tokens_is_capped_by_the_route(requested: int | None, cap: int | None, known: int | None) -> None:
    """Without max_tokens the route's limit counts, since the gateway sends the limit upstream."""
    limited = route(limits={"output_tokens": cap})
    assert QueuedRequest("r", request(max_tokens=requested), PromptEstimate({}), limited, 1).output_cap == known


def test_policies_see_the_request_but_not_its_text() -> None:
    """RequestView has the fields for `when` and scorers, and neither body nor prompt."""
    headers = {"x-priority": "2", "x-session-id": "s", "x-slo-ttft-ms": "300", "x-slo-tpot-ms": "30"}
    inference = request(headers, stream=True, tools=[{}], response_format={"type": "json_object"})
    seen = RequestView(**{field.name: getattr(inference, field.name) for field in fields(RequestView)})
    assert seen == RequestView(
        arrival=inference.arrival,
        stream=True,
        tools=True,
        json_schema=True,
        priority=2,
        session="s",
        ttft_budget=0.3,
        tpot_budget=0.03,
    )
    assert "hello" not in repr(seen)
