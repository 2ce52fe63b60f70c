"""A caller's own key (`api_key: caller`) over real sockets.

It reaches its provider and no other place, and what it brings back is its caller's alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from gateway.app import Gateway
from gateway.cli.live.live_check import announcement, report
from gateway.config.loading import problems
from gateway.config.models import Config
from gateway.observe.record import RequestOutcome
from policies.queue.queued_request import QueuedRequest
from policies.types import NEVER, Decision, Health
from tests.support.builders import STREAMED, calling, last, post
from tests.support.canaries import CALLER, OWN_KEY, CanaryGateway, gateway_with_canaries, leaks_in
from tests.support.gateways import document, pool, running, started
from tests.support.simulated import eventually
from tests.support.upstream import Received, Script, Upstream, reply

OWN, OTHERS, OURS = OWN_KEY, "sk-ant-oat01-quollcallerskey", "ft-gatewaykeyofthecaller"
JSON = "content-type: application/json"
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 2},
}
ANSWER: Script = [reply(json.dumps(MESSAGE).encode(), "200 OK", JSON)]
WHOLE = json.dumps(
    {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 90, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}},
    }
).encode()
BODY: dict[str, Any] = {"model": "chat", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
KEYS = {"keys": [{"name": "dev", "sha256": hashlib.sha256(OURS.encode()).hexdigest()}]}


def claude(url: str, **more: Any) -> dict[str, Any]:
    return {"backend": "anthropic", "model": "claude", "base_url": url, "api_key": "caller", **more}


def compatible(url: str, **more: Any) -> dict[str, Any]:
    return pool(url, **{"api_key": "caller", **more})


def refusal(status: str, kind: str, *headers: str, said: str = "no") -> Script:
    body = {"type": "error", "error": {"type": kind, "message": f"{said}: {OWN}"}}
    return [reply(json.dumps(body).encode(), status, JSON, *headers)]


DENIED = refusal("401 Unauthorized", "authentication_error")
FORBIDDEN = refusal("403 Forbidden", "permission_error")
LIMITED = refusal(
    "429 Too Many Requests", "rate_limit_error", "retry-after: 30",
    "anthropic-ratelimit-requests-remaining: 0", "anthropic-ratelimit-requests-limit: 50",
    "anthropic-ratelimit-requests-reset: 2099-01-01T00:00:00Z",
)  # fmt: skip
UNPAID = refusal("402 Payment Required", "billing_error")
UNKNOWN = refusal("404 Not Found", "not_found_error", said="model: claude")


class CallersProvider(Upstream):
    """Answers by key; counts the requests of each."""

    def __init__(self, answer: Script = ANSWER, **by_key: Script) -> None:
        super().__init__(answer)
        self.answer, self.by_key = answer, by_key
        self.asked: Counter[str] = Counter()

    def script(self, received: Received) -> Script:
        key = received.headers.get("authorization", received.headers.get("x-api-key", "")).rpartition(" ")[2]
        self.asked[key] += 1
        return next((said for part, said in self.by_key.items() if part in key), self.answer)


async def ask(gateway: Gateway, *headers: str, path: str = "/v1/messages", **more: Any) -> tuple[int, str]:
    """Status and reply."""
    async with calling(gateway.url) as caller:
        status, answer, body = await caller.whole(post({**BODY, **more}, *headers, path=path))
    return status, f"{answer} {body.decode()}"


def bearer(key: str) -> str:
    return f"authorization: Bearer {key}"


def is_untouched(gateway: Gateway) -> bool:
    """Nothing is held against any endpoint, for nobody."""
    states = gateway.fleet._states.values()
    return all(
        not state.callers.states and state.breaker.health(NEVER) is Health.UP and not any(state.refusals)
        for state in states
    )


# --------------------------------------------------------------------------- which key goes where


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (bearer(OWN), {"authorization": f"Bearer {OWN}"}),
        ("x-api-key: sk-ant-api03-bilby0123456789", {"x-api-key": "sk-ant-api03-bilby0123456789"}),
        (bearer("sk-ant-api03-bilby0123456789"), {"x-api-key": "sk-ant-api03-bilby0123456789"}),
    ],
)
async def test_a_caller_key_reaches_anthropic_in_the_header_that_its_kind_has(
    sent: str, received: dict[str, str]
) -> None:
    """A subscription's token is a bearer token; an API key is not, whatever SDK has sent it."""
    async with (
        CallersProvider() as provider,
        running({"claude": claude(provider.url)}, {"chat": {"tiers": ["claude"]}}) as g,
    ):
        status, _ = await ask(g, sent, "anthropic-beta: oauth-2025-04-20")
    headers = provider.requests[-1].headers
    assert status == 200
    assert {name: headers[name] for name in ("authorization", "x-api-key") if name in headers} == received
    assert headers["anthropic-beta"] == "oauth-2025-04-20"


async def test_the_sdks_send_their_own_key_through_the_gateway() -> None:
    """Anthropic's SDK and OpenAI's, to a server of the same dialect."""
    async with CallersProvider() as first, Upstream([STREAMED]) as second:
        pools = {"claude": claude(first.url), "gpt": compatible(second.url)}
        async with running(pools, {"a": {"tiers": ["claude"]}, "b": {"tiers": ["gpt"]}}) as gateway:
            async with AsyncAnthropic(base_url=gateway.url, auth_token=OWN, max_retries=0) as client:
                said = await client.messages.create(
                    model="a", max_tokens=5, messages=[{"role": "user", "content": "x"}]
                )
            async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="sk-openais-own-key", max_retries=0) as other:
                asked: Any = {"model": "b", "messages": [{"role": "user", "content": "x"}]}
                async for _ in await other.chat.completions.create(**asked, stream=True):
                    pass
    assert said.content[0].type == "text"
    assert first.requests[-1].headers["authorization"] == f"Bearer {OWN}"
    assert second.requests[-1].headers["authorization"] == "Bearer sk-openais-own-key"


async def test_a_gateway_with_keys_takes_its_own_in_a_header_of_its_own() -> None:
    """Neither key gets to the other side, and the key of the gateway is never passed on."""
    async with CallersProvider() as provider, running({"claude": claude(provider.url)}, None, **KEYS) as gateway:
        both = f"x-firsttoken-key: {OURS}", bearer(OWN)
        assert (await ask(gateway, *both))[0] == 200
        assert "x-firsttoken-key" not in provider.requests[-1].headers
        assert OURS not in str(provider.requests[-1].headers)
        assert (await ask(gateway, "x-firsttoken-key: ft-wrong", bearer(OWN)))[0] == 401
        for sent in ([bearer(OURS)], [f"x-firsttoken-key: {OURS}"], [f"x-firsttoken-key: {OURS}", bearer(OURS)]):
            status, said = await ask(gateway, *sent)
            assert (status, "your own key" in said) == (401, True)
        assert "x-firsttoken-key" in said
        assert (await ask(gateway, bearer(OWN)))[0] == 401
    assert len(provider.requests) == 1


async def test_a_caller_without_a_key_gets_the_next_tier_and_no_key_of_another() -> None:
    """A placeholder is no key. Where no tier is left, 401 says what to send."""
    async with CallersProvider() as provider, Upstream([reply(WHOLE, "200 OK", JSON)]) as ours:
        pools = {"claude": claude(provider.url), "small": pool(ours.url)}
        routes = {"chat": {"tiers": ["claude", "small"]}, "alone": {"tiers": ["claude"]}}
        async with running(pools, routes) as gateway:
            for sent in ([], [bearer("none")], [bearer(OWN), f"x-api-key: {OTHERS}"]):
                assert (await ask(gateway, *sent))[0] == 200
                assert last(gateway).endpoint.pool == "small"
                status, said = await ask(gateway, *sent, model="alone")
                assert (status, "authentication_error" in said) == (401, True)
            assert (await ask(gateway, bearer(OWN)))[0] == 200
            assert last(gateway).endpoint.pool == "claude"
    assert provider.asked == {OWN: 1}
    assert all(OWN not in str(request.headers) for request in ours.requests)


# --------------------------------------------------------------------------- blame


@pytest.mark.parametrize(
    ("said", "status"), [(DENIED, 401), (FORBIDDEN, 403), (LIMITED, 429), (UNPAID, 402), (UNKNOWN, 404)]
)
async def test_a_bad_key_is_its_callers_fault_and_takes_nothing_from_others(said: Script, status: int) -> None:
    """The caller gets the provider's status, without a word of the key; others are served at once. However many such
    callers there are, they are no witnesses against the endpoint."""
    async with CallersProvider(bilby=said) as provider:
        config = {"claude": claude(provider.url)}, {"chat": {"tiers": ["claude"]}}
        async with running(*config, keys=[key(name) for name in "abc"]) as gateway:
            for _ in range(4):
                for name in "ab":
                    got, answer = await ask(gateway, f"x-firsttoken-key: ft-key-of-{name}", bearer(OWN))
                    assert (got, OWN in answer) == (status, False)
                    assert last(gateway).end is RequestOutcome.REFUSED
                    assert OWN not in str(last(gateway))
                assert ("retry-after: 30" in answer or "'retry-after': '30'" in answer) is (status == 429)
                assert (await ask(gateway, "x-firsttoken-key: ft-key-of-c", bearer(OTHERS)))[0] == 200
            assert is_untouched(gateway)
            [endpoint] = gateway.fleet.snapshot(monotonic()).loads.values()
            assert (endpoint.health, endpoint.limits.wait(10_000, monotonic())) == (Health.UP, 0)
    assert provider.asked == {OWN: 8, OTHERS: 4}  # no retry, no probe


def key(name: str) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(f"ft-key-of-{name}".encode()).hexdigest()}


async def test_a_bad_key_goes_to_the_routes_next_pool() -> None:
    """As any failure does: with the key of the gateway there."""
    async with CallersProvider(bilby=LIMITED) as provider, Upstream([reply(WHOLE, "200 OK", JSON)]) as ours:
        pools = {"claude": claude(provider.url), "small": pool(ours.url)}
        async with running(pools) as gateway:
            assert (await ask(gateway, bearer(OWN)))[0] == 200
            assert (last(gateway).endpoint.pool, len(last(gateway).attempts)) == ("small", 2)
            assert is_untouched(gateway)
    assert ours.requests[-1].headers["authorization"] == "Bearer sk-backend"


async def test_an_error_event_about_the_key_is_the_callers_too() -> None:
    """A stream of status 200 may refuse the key as well."""
    event = b'event: error\ndata: {"type":"error","error":{"type":"authentication_error","message":"no"}}\n\n'
    said = [reply(event, "200 OK", "content-type: text/event-stream")]
    async with CallersProvider(said) as provider, running({"claude": claude(provider.url)}) as gateway:
        for _ in range(4):
            status, _ = await ask(gateway, bearer(OWN), stream=True)
            assert status == 401
        assert is_untouched(gateway)


# --------------------------------------------------------------------------- caches


async def test_a_provider_is_named_another_cache_for_each_key() -> None:
    """Of one tenant of the gateway too; the name tells nothing of the key, and an engine of ours gets the tenant's."""
    async with Upstream([reply(WHOLE, "200 OK", JSON)]) as server:
        account = {"backend": "openai", "model": "m", "base_url": f"{server.url}/v1", "api_key": "caller"}
        pools = {"gpt": account, "mine": {**account, "api_key": "sk-ours"}}
        async with running(pools, {name: {"tiers": [name]} for name in pools}, **KEYS) as gateway:
            for sent, model in ((OWN, "gpt"), (OWN, "gpt"), (OTHERS, "gpt"), (OWN, "mine"), (OTHERS, "mine")):
                both = f"x-firsttoken-key: {OURS}", bearer(sent)
                assert (await ask(gateway, *both, path="/v1/chat/completions", model=model))[0] == 200
    first, same, other, mine, also = [json.loads(one.body)["prompt_cache_key"] for one in server.requests]
    assert (first == same, first == other, mine == also, mine in (first, other)) == (True, False, True, False)


async def test_counts_of_cached_tokens_are_masked_where_callers_may_share_a_cache() -> None:
    """A provider keeps a cache for each account; of any other server that is not known."""
    async with Upstream([reply(WHOLE, "200 OK", JSON)]) as server:
        pools = {
            "unknown": compatible(server.url),
            "account": {"backend": "openai", "model": "m", "base_url": f"{server.url}/v1", "api_key": "caller"},
        }
        async with running(pools, {name: {"tiers": [name], "upstream_stream": "off"} for name in pools}) as gateway:
            counts = []
            for name in pools:
                _, answer = await ask(gateway, bearer(OWN), path="/v1/chat/completions", model=name)
                counts.append(json.loads(answer.partition("} ")[2])["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert counts == [0, 64]


async def test_an_answer_paid_by_a_caller_is_kept_for_nobody() -> None:
    """The cache of answers is for what the gateway's keys have paid."""
    routes = {"chat": {"tiers": ["gpt"], "cache": {"ttl": "1h", "any_temperature": True}, "upstream_stream": "off"}}
    async with (
        Upstream([reply(WHOLE, "200 OK", JSON)]) as server,
        running({"gpt": compatible(server.url)}, routes) as gateway,
    ):
        for _ in range(2):
            assert (await ask(gateway, bearer(OWN), path="/v1/chat/completions"))[0] == 200
    assert len(server.requests) == 2


# --------------------------------------------------------------------------- cost, configuration, commands


def test_a_pool_of_callers_keys_has_no_price_no_pings_and_no_other_key() -> None:
    """What would be of no effect, or of an effect that is not meant, is an error."""
    for more, said in (
        ({"price": {"input": 1.0}}, "price is of what"),
        ({"keep_warm": {"idle": "5m"}}, "keep_warm requires a key"),
        ({"headers": {"X-Api-Key": "sk-other"}}, "would replace the callers' keys"),
        ({"api_keys": ["sk-one"]}, "exclude each other"),
        ({"backend": "vllm", "base_url": None, "endpoints": ["http://a:1"]}, "take no key of a caller's"),
    ):
        with pytest.raises(ValueError, match=said):
            Config.model_validate(document({"claude": claude("http://127.0.0.1:1", **more)}))


def test_a_route_shows_a_callers_key_to_one_provider_alone() -> None:
    """Two pools of one provider are no second provider."""
    pools = {"a": claude("https://one.test"), "b": claude("https://one.test"), "c": claude("https://two.test")}
    wrong = Config.model_validate(document(pools, {"chat": {"tiers": ["a", "b", "c"]}}))
    assert ["to the servers of c too" in found.text for found in problems(wrong)] == [True]
    assert not problems(Config.model_validate(document(pools, {"chat": {"tiers": ["a", "b"]}})))


def test_check_live_tells_that_it_has_no_key_to_ask_with() -> None:
    """In one line."""
    config = Config.model_validate(document({"claude": claude("http://127.0.0.1:1")}))
    assert announcement(config, tokens=True).startswith("live: each of 0 endpoints")
    assert report(config, [])[0][-1] == "not asked: claude, for which callers have the keys"


# --------------------------------------------------------------------------- the key is in no other place

CASES: dict[str, Script] = {
    "answered": ANSWER,
    "denied": DENIED,
    "limited": LIMITED,
    "the server fails, and quotes the key": refusal("500 Internal Server Error", f"api_error {OWN}"),
    "a bad request that quotes the key": refusal("400 Bad Request", "invalid_request_error"),
    "an error inside": [reply(b'{"type":"error","error":{"type":"x","message":"%s"}}' % OWN.encode(), "200 OK", JSON)],
    "no JSON": [reply(OWN.encode(), "200 OK", JSON)],
}


@asynccontextmanager
async def canaries(
    folder: Path, found: list[str], script: Script
) -> AsyncIterator[tuple[CanaryGateway, CallersProvider]]:
    """A gateway with every sink, its log at its most talkative, Redis, a collector, and keys of its own."""
    async with CallersProvider(script) as provider:
        routes = {"chat": {"tiers": ["only"]}, "own": {"tiers": ["claude"], "cache": {"ttl": "1h"}}}
        pools = {"claude": claude(provider.url)}
        async with gateway_with_canaries(folder, [STREAMED], found=found, routes=routes, pools=pools) as world:
            yield world, provider


@pytest.mark.parametrize("case", CASES)
async def test_a_callers_key_is_in_no_place_but_the_request_to_its_provider(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Logs, metrics, traces, the admin port, Redis, other callers' replies, the saved state, and its own reply."""
    found: list[str] = []
    async with canaries(tmp_path, found, CASES[case]) as (world, provider):
        statuses = []
        for stream in (False, True):
            sent = bearer(OWN), f"x-firsttoken-key: {CALLER}"
            status, answer = await ask(world.gateway, *sent, model="own", stream=stream, temperature=0)
            found += [] if case == "no JSON" and stream else leaks_in("its own reply", answer, (OWN,))
            statuses.append(status)
            await eventually(lambda: world.gateway.recorder.live == 0)
        assert (statuses[0] == 200) is (case == "answered")
        assert provider.asked[OWN] >= 2
        assert OWN not in str(list(world.gateway.recorder.recent))
        assert logging.getLogger().level == logging.DEBUG
    out, err = capfd.readouterr()
    found += leaks_in("standard output", out, (OWN,)) + leaks_in("standard error", err, (OWN,))
    assert found == []


async def test_a_pool_that_takes_callers_keys_since_a_reload_gets_that_of_a_request_which_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The endpoints are of the configuration in force, and so is the key that these are sent."""
    async with CallersProvider([reply(WHOLE, "200 OK", JSON)]) as provider:
        before = Config.model_validate(document({"a": compatible(provider.url, api_key="sk-of-the-operator-0123")}))
        after = Config.model_validate(document({"a": compatible(provider.url)}))
        async with started(Gateway(before)) as gateway:
            decide = gateway.queue.decide

            async def reloading(queued: QueuedRequest, entered_at: float) -> Decision | None:
                await gateway.apply_config(after)
                return await decide(queued, entered_at)

            monkeypatch.setattr(gateway.queue, "decide", reloading)
            status, _ = await ask(gateway, bearer(OWN), path="/v1/chat/completions")
        assert (status, provider.asked) == (200, Counter({OWN: 1}))
