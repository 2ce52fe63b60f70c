"""From a request to a decision: parsing, estimates, and the inputs of policies."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from random import Random
from time import monotonic
from typing import Any

import pytest

from backends.interface import Operation
from gateway.admission.auth import ANYONE, Tenant
from gateway.api.api_error import ApiError
from gateway.api.inference_request import InferenceRequest
from gateway.observe.record import RequestOutcome
from gateway.request_steps import LARGE, MANY, Decider, queued_request
from gateway.strict_json import decode, encode
from gateway.tokenize.estimator import BACKLOG, Estimator
from gateway.tokenize.prompt_reader import PromptText, TokenizerConfig
from policies.fleet.fleet import AttemptReport, Fleet
from policies.latency.answer_lengths import KNOWN_ANSWERS
from policies.queue.queued_request import QueuedRequest
from policies.routes.route import Route
from policies.types import (
    MEDIAN,
    AttemptOutcome,
    Endpoint,
    Placement,
    Pool,
    PoolEstimate,
    Price,
    PromptEstimate,
    Quantiles,
    RequestView,
)
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
    estimator = Estimator({"small": TokenizerConfig(), "large": TokenizerConfig()}, fleet.view.token_scale)
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


async def test_a_whole_answer_is_expected_by_effort_caller_and_route(decider: Decider) -> None:
    """Where the route promises its end; the answers of other routes are not looked at."""
    hard = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "high"}
    promised, tenant = route(tiers=["small"], total={"budget": "30s"}), Tenant("web")
    for _ in range(3 * KNOWN_ANSWERS):
        for effort, tokens in (("high", 5000), ("", 50)):
            told = {"tenant": "web", "output_tokens": tokens, "job_class": effort}
            decider.learn(record(route="chat", weighs_completion=True, **told))
            decider.learn(record(route="other", **told))

    async def expected(body: Mapping[str, Any], own: Route) -> Quantiles:
        asked = await decider.parse(Operation.CHAT, encode(body), {}, 1.0, "req-1")
        estimate = await decider.estimate(asked, own, tenant)
        return queued_request(decider.fleet, asked, own, estimate, tenant, 1, monotonic()).answer_tokens

    easy = {name: value for name, value in hard.items() if name != "reasoning_effort"}
    assert (await expected(hard, promised))[MEDIAN] > 2000 > 200 > (await expected(easy, promised))[MEDIAN]
    assert (await expected({**hard, "max_tokens": 100}, promised))[MEDIAN] == 100
    assert await expected(hard, route(tiers=["small"])) == ()
    by_class, of_all = (decider.answer_lengths.quantiles("other", None, *names) for names in (("high", "web", 0), ()))
    assert by_class == of_all  # a route that does not weigh its answers keeps no classes of them


async def test_cache_groups_share_no_prefix(decider: Decider) -> None:
    """Block hashes differ between cache groups: a hit would reveal another group's prompts."""
    long = request(messages=[{"role": "user", "content": "word " * 100}])
    blocks = [
        tuple((await decider.estimate(long, BOTH, Tenant(name, cache_group=group))).pools["small"].blocks.hashes)
        for name, group in (("one", "web"), ("two", "web"), ("three", "lab"), ("anyone", ""))
    ]
    assert blocks[0] == blocks[1]
    assert len(set(blocks)) == 3


# --------------------------------------------------------------------------- counts before and after the send

LONG = inspect.getsource(inspect)
OTHER = inspect.getsource(json)
MORE = inspect.getsource(argparse)  # 100 KB


def long(text: str = LONG[:20_000], **more: object) -> InferenceRequest:
    return request(messages=[{"role": "user", "content": text}], **more)


def with_window(window: int) -> Decider:
    """A tier of this context window before one without any."""
    fleet = Fleet([replace(POOLS[1], context_window=window), POOLS[0]])
    return Decider(Estimator({"small": TokenizerConfig(), "large": TokenizerConfig()}, fleet.view.token_scale), fleet)


def tokens_of(decider: Decider, asked: InferenceRequest, tier: str = "large") -> int:
    """By an exact count."""
    text = PromptText(asked.prompt, [tier])
    for _ in decider.estimator.count(text):
        pass
    return decider.estimator.estimate(text).pools[tier].tokens


async def teach(decider: Decider) -> None:
    """Count some code of the same key: its weights are learned."""
    assert (await decider.estimate(long(MORE), BOTH, ANYONE)).counted


async def counted(decider: Decider) -> None:
    """Everything that was sent is counted."""
    async with asyncio.timeout(60):
        while decider.counts.bytes:  # noqa: ASYNC110 - counts notify nobody
            await asyncio.sleep(0.001)


async def test_the_first_texts_of_a_key_are_counted_first(decider: Decider) -> None:
    """Nothing has taught their estimate: a growing budget would be by the wrong tokens."""
    assert (await decider.estimate(long(MORE), route(), ANYONE)).counted
    assert not (await decider.estimate(long(), route(), ANYONE)).counted
    assert (await decider.estimate(long(OTHER), route(), Tenant("another"))).counted


async def test_new_text_is_counted_after_the_decision(decider: Decider) -> None:
    """The next turn is exact, and so is what the engine's report teaches."""
    await teach(decider)
    asked = long()
    before = await decider.estimate(asked, route(), ANYONE)
    assert not before.counted
    assert decider.counts.bytes == asked.prompt.size
    await counted(decider)
    after = await decider.estimate(long(), route(), ANYONE)
    assert after.counted
    assert after.pools["small"].tokens == tokens_of(decider, asked, "small")
    assert before.pools["small"].count() == after.pools["small"].text_tokens


@pytest.mark.parametrize("room", [-1, 0])
async def test_a_prompt_at_the_edge_of_a_context_window_is_counted_first(room: int) -> None:
    """One token more than the window is one too many, and the last one that fits is taken."""
    asked = long(max_tokens=100)
    window = tokens_of(with_window(10**6), asked) + 100 + room
    decider = with_window(window)
    await teach(decider)
    estimate = await decider.estimate(asked, BOTH, ANYONE)
    assert estimate.counted
    unfit = [each.pool for each in decider.decide(asked, BOTH, estimate, ANYONE, 1).rejected]
    assert unfit == (["large"] if room else [])


@pytest.mark.parametrize("more", [0, 1])
async def test_a_prompt_at_the_edge_of_a_condition_is_counted_first(decider: Decider, more: int) -> None:
    """`when: {prompt_tokens: "<= N"}` holds for N tokens and not for one more."""
    await teach(decider)
    asked = long()
    tokens = tokens_of(with_window(10**6), asked)
    tiers = [{"pool": "small", "when": {"prompt_tokens": f"<= {tokens - more}"}}, "large"]
    estimate = await decider.estimate(asked, route(tiers=tiers), ANYONE)
    assert estimate.counted
    unfit = [each.pool for each in decider.decide(asked, route(tiers=tiers), estimate, ANYONE, 1).rejected]
    assert ("small" in unfit) is bool(more)


async def test_a_prompt_far_from_every_edge_is_not_counted_first() -> None:
    """A count would only take time."""
    decider = with_window(200_000)
    await teach(decider)
    tiers = [{"pool": "large", "when": {"prompt_tokens": "<= 100000"}}, "small"]
    assert not (await decider.estimate(long(), route(tiers=tiers), ANYONE)).counted


async def test_tokens_that_are_asked_for_are_counted(decider: Decider) -> None:
    """`count_tokens` of Anthropic's Messages answers with the count."""
    raw = encode({"model": "chat", "messages": [{"role": "user", "content": LONG[:20_000]}]})
    asked = await decider.parse(Operation.COUNT_TOKENS, raw, {}, 0.0, "req-1")
    assert (await decider.estimate(asked, route(), ANYONE)).counted


@pytest.mark.parametrize("second", [LONG[:20_000], LONG[:16_000] + OTHER[:4_000]])
async def test_equal_prompts_at_once_go_to_one_engine(decider: Decider, second: str) -> None:
    """Or prompts with an equal beginning, before anything of the first is counted: its blocks are of the text, and the
    endpoint has them from the send on."""
    await teach(decider)
    first, other = long(), long(second)
    estimate = await decider.estimate(first, route(), ANYONE)
    chosen = decider.decide(first, route(), estimate, ANYONE, 1).ranked[0]
    decider.fleet.on_sent("first", chosen, estimate.pools["small"], monotonic(), stream=True)
    assert decider.counts.bytes
    found = decider.decide(other, route(), await decider.estimate(other, route(), ANYONE), ANYONE, 2).ranked
    hits = {each.endpoint.id: each.hit for each in found}
    shared = 16_000 / 20_000 if second != LONG[:20_000] else 1.0
    assert hits[chosen.endpoint.id] == pytest.approx(shared * chosen.prompt_tokens, rel=0.1)
    assert sum(hits.values()) == hits[chosen.endpoint.id]


def submitted(decider: Decider) -> list[object]:
    """Tasks of the executor, from now on."""
    ran, submit = list[object](), decider.estimator.executor.submit
    decider.estimator.executor.submit = lambda *task: ran.append(task) or submit(*task)  # type: ignore[method-assign]
    return ran


MANY_SHORT = [f"{number} is short" for number in range(120)]


@pytest.mark.parametrize(
    ("operation", "body", "threads"),
    [
        (Operation.COMPLETION, {"prompt": ["word " * LARGE]}, 2),  # an estimate, and a count
        (Operation.EMBEDDINGS, {"input": ["word " * LARGE]}, 2),
        (Operation.COMPLETION, {"prompt": MANY_SHORT}, 1),
        (Operation.COMPLETION, {"prompt": MANY_SHORT[:20]}, 0),
        (Operation.CHAT, {"messages": [{"role": "user", "content": text} for text in MANY_SHORT]}, 1),
    ],
)
async def test_prompts_slow_to_read_are_read_in_a_thread(
    decider: Decider, operation: Operation, body: dict[str, object], threads: int
) -> None:
    """Long ones, and those of many short texts, which are counted at once, however they are listed."""
    asked = await decider.parse(operation, encode({"model": "chat", **body}), {}, 0.0, "req-1")
    ran = submitted(decider)
    await decider.estimate(asked, route(), ANYONE)
    assert len(ran) == threads


async def test_many_long_prompts_at_once_are_decided_without_a_count(decider: Decider) -> None:
    """What waits to be counted is bounded, and its requests do not wait for it."""
    await teach(decider)
    text = LONG * 2
    for number in range(120):
        asked = long(f"{number} {text[:100_000]}")
        assert not (await decider.estimate(asked, route(), ANYONE)).counted
        assert decider.counts.bytes <= BACKLOG
    assert decider.counts.dropped > 30


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


async def test_a_prompt_whose_cost_may_exceed_what_apis_may_cost_is_counted() -> None:
    """Once the texts of the key have taught their tokens, others are sent with an estimate."""
    fleet = Fleet([Pool("api", "served", (Endpoint("api/a", "api"),), local=False, price=PRICE)])
    decider, random = Decider(Estimator({"api": TokenizerConfig()}, fleet.view.token_scale), fleet), Random(1)
    words = "the prompt of a request is read and then counted by words that nobody has seen before".split()

    async def estimated(**limits: Any) -> PromptEstimate:
        asked = request(messages=[{"role": "user", "content": " ".join(random.choices(words, k=2000))}])
        return await decider.estimate(asked, route(tiers=["api"], limits=limits), ANYONE)

    for _ in range(12):
        free = await estimated()
    usd = PRICE.of(free.pools["api"].tokens, free.output_tokens)
    near = await estimated(external={"usd_per_hour": usd})
    far = await estimated(external={"usd_per_hour": 3 * usd})
    assert (free.counted, near.counted, far.counted) == (False, True, False)
