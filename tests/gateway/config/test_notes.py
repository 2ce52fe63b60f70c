"""Notes of `firsttoken check`: each names a setting without the effect that it seems to have."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from gateway.config.models import Config
from gateway.config.notes import duration, notes

KEY = "sk-0123456789abcdef"
UNPRICED = {"backend": "openai", "model": "m", "api_key": KEY}
API = {**UNPRICED, "price": {"output": 1}}
ENGINE = {"backend": "vllm", "model": "m", "endpoints": ["http://a", "http://b"]}


def noted(*names: str, pools: dict[str, Any], keys: Any = (), **route: Any) -> list[str]:
    """Notes on a configuration with one route over the pools."""
    tiers = {"tiers": list(names or pools), **route}
    return notes(Config.model_validate({"pools": pools, "routes": {"chat": tiers}, "keys": keys}))


def test_a_public_admin_port_is_noted() -> None:
    """A public admin port shows everything, but Prometheus on another machine may need the port."""
    config = Config.model_validate({"server": {"admin": "0.0.0.0:9090"}})
    assert notes(config) == ["note: server.admin 0.0.0.0:9090 requires no key; keep it on a private network"]


@pytest.mark.parametrize(
    ("state", "noted"),
    [
        ({"keys": "redis"}, True),
        ({"keys": "dir", "dir": "."}, True),
        ({"keys": "redis", "cache_secret": "a configured secret"}, False),
        ({"keys": "config"}, False),
    ],
)
def test_stored_keys_without_cache_secret_are_noted(state: dict[str, str], noted: bool) -> None:
    """Stored members of a cache group change at runtime, and without a configured secret so does the caches' salt."""
    keys = [{"name": "a", "sha256": "0" * 64, "cache_group": "team"}]
    config = Config.model_validate({"state": {"redis": "redis://127.0.0.1/0", **state}, "keys": keys})
    alone = Config.model_validate(
        {"state": {"redis": "redis://127.0.0.1/0", **state}, "keys": [{**keys[0], "cache_group": None}]}
    )
    assert not any("cache_group" in note for note in notes(alone))
    expected = (
        "note: stored keys that share a cache_group need state.cache_secret: without it every key that joins or"
        " leaves the group empties its caches"
    )
    assert notes(config) == ([expected] if noted else [])


def test_a_limit_in_usd_at_an_api_without_a_price_is_noted() -> None:
    """It costs nothing by the configuration. Engines of one's own need no price."""
    api = {"backend": "openai", "model": "m", "api_key": KEY, "endpoints": ["https://api.openai.com/v1"]}
    free = {**api, "price": {"output": 0}}
    pools = {"own": {"backend": "vllm", "model": "m", "endpoints": ["http://h"]}, "free": free}
    pools["paid"] = {**api, "model": "n", "price": {"input": 1}}
    tiers = {"tiers": [*pools]}
    routes = {
        "usd": {**tiers, "limits": {"external": {"usd_per_hour": 5}}},
        "share": {**tiers, "limits": {"external": "2%"}},
    }
    assert notes(Config.model_validate({"pools": pools, "routes": routes})) == [
        "note: limits.external.usd_per_hour of route usd never acts at pool free, which has no price"
    ]


def test_a_tpot_that_no_engine_of_a_pool_keeps_is_noted() -> None:
    """By the simulation profiles, where all servers have one; of the fastest server."""
    hosts = count()

    def pool(*profiles: str | None, **more: str) -> dict[str, object]:
        named = [{"url": f"http://h{next(hosts)}", **({"profile": name} if name else {})} for name in profiles]
        return {"backend": "simulated", "model": "m", "endpoints": named, **more}

    pools = {"slow": pool("8b-l4"), "mixed": pool("8b-l4", "8b-h100"), "unknown": pool("8b-l4", None)}
    pools["default"] = pool(None, "8b-l4", profile="8b-l4")
    tiers = {"tiers": [*pools]}
    routes = {"chat": {"tpot": {"budget": "50ms"}, **tiers}, "calm": {"tpot": {"budget": "70ms"}, **tiers}}
    routes["free"] = {"tpot": "off", **tiers}
    assert notes(Config.model_validate({"pools": pools, "routes": routes})) == [
        f"note: no engine of pool {name} keeps the tpot of route chat: an answer alone takes 59.9ms per token by its"
        " profile, and the budget is 50ms"
        for name in ("slow", "default")
    ]


@pytest.mark.parametrize("key", ["none", "EMPTY", "x", "sk-"])
def test_a_placeholder_key_is_noted(key: str) -> None:
    """It is not masked. No key, and a key of a provider, need no note."""
    pools = {"own": {**ENGINE, "api_key": key}, "none": {**ENGINE, "endpoints": ["http://c"]}, "real": API}
    assert noted(pools=pools) == [
        "note: a key of pool own is taken for a placeholder, being shorter than 16 characters: it is not masked in"
        " error messages of the servers"
    ]


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("http://api.openai.com/v1", True),
        ("http://8.8.8.8", True),
        ("https://api.openai.com/v1", False),
        ("http://127.0.0.1:8000", False),
        ("http://10.0.0.11:8000", False),
        ("http://[fd00::1]:8000", False),
        ("http://engine:8000", False),
        ("http://engines.default.svc:8000", False),
        ("http://engines.default.svc.cluster.local:8000", False),
        ("http://localhost:8000", False),
    ],
)
def test_a_key_sent_to_a_public_host_in_the_clear_is_noted(url: str, public: bool) -> None:
    """Names of the own network, and private addresses, are not public."""
    server = url.removeprefix("http://").removesuffix("/v1") + ":80"
    note = f"note: pool api sends its key to {server} without encryption; write https"
    pool = {"backend": "compatible", "model": "m", "endpoints": [url], "price": {"output": 1}}
    assert noted(pools={"api": {**pool, "api_key": KEY}}) == ([note] if public else [])
    assert noted(pools={"api": pool}) == []


def test_an_engine_in_two_pools_is_noted() -> None:
    """Whatever the model: it computes for both. Its data-parallel ranks are engines of their own."""
    other = {**ENGINE, "model": "n", "endpoints": ["http://b/v1", "http://c"]}
    assert noted(pools={"one": ENGINE, "two": other}) == [
        "note: b:80 is a server of pools one and two: its load is modelled for each of them apart"
    ]
    ranks = {f"p{rank}": {**ENGINE, "endpoints": [{"url": "http://a", "dp_rank": rank}]} for rank in range(2)}
    assert noted(pools=ranks) == []


def test_an_api_in_two_pools_is_noted_for_the_same_model_and_key() -> None:
    """Another model, or another key, has limits and caches of its own."""
    assert noted(pools={"one": API, "two": API}) == [
        "note: api.openai.com:443 is a server of pools one and two: its load is modelled for each of them apart"
    ]
    assert noted(pools={"one": API, "two": {**API, "model": "n"}}) == []
    assert noted(pools={"one": API, "two": {**API, "api_key": f"{KEY}2"}}) == []


@pytest.mark.parametrize(
    ("pool", "budget", "least"),
    [
        (ENGINE, "14ms", "15.1ms"),
        (ENGINE, "16ms", None),
        ({**ENGINE, "profile": "8b-l4"}, "70ms", "74.9ms"),
        ({**ENGINE, "profile": "8b-l4"}, "80ms", None),
        (API, "9ms", "10ms"),
        (API, "11ms", None),
    ],
)
def test_a_ttft_that_no_server_makes_is_noted(pool: dict[str, Any], budget: str, least: str | None) -> None:
    """For a prompt of one token, at rest."""
    note = (
        "note: no server makes the ttft of route chat: at rest the fastest of its pools is expected to take"
        f" {least}, and the budget is {budget}"
    )
    found = noted(pools={"only": pool}, ttft={"budget": budget}, tpot="off")
    assert found == ([note] if least else [])
    pools = {"only": pool, "fast": {**ENGINE, "endpoints": ["http://f"]}}
    assert noted(pools=pools, ttft={"budget": "16ms"}, tpot="off") == []


@pytest.mark.parametrize(("budget", "is_lost"), [("100ms", True), ("200ms", False)])
def test_a_total_that_no_tier_keeps_is_noted(budget: str, is_lost: bool) -> None:
    """Of two tokens, by the profiles of all its pools."""
    slow, unknown = {**ENGINE, "profile": "8b-l4"}, {**ENGINE, "endpoints": ["http://f"]}
    note = "note: no tier keeps the total of route chat: two tokens take 134.8ms by the profiles of its pools, and the"
    found = noted(pools={"only": slow}, ttft="off", tpot="off", total={"budget": budget})
    assert found == ([f"{note} budget is {budget}"] if is_lost else [])
    pools = {"only": slow, "fast": unknown}
    assert noted(pools=pools, ttft="off", tpot="off", total={"budget": budget}) == []


@pytest.mark.parametrize(
    ("pools", "reason"),
    [
        ({"a": API, "b": {**API, "model": "n"}}, "only servers of vllm, sglang, simulated continue an answer"),
        ({"a": {**ENGINE, "endpoints": ["http://a"]}}, "there is no second endpoint to continue an answer"),
        ({"a": ENGINE}, None),
        ({"a": {**ENGINE, "endpoints": ["http://a"]}, "b": API}, None),
        ({"a": {**ENGINE, "endpoints": [{"url": "http://a", "resolve": "10s"}]}}, None),
    ],
)
def test_a_rescue_that_no_server_can_do_is_noted(pools: dict[str, Any], reason: str | None) -> None:
    """A name with several addresses is several servers."""
    expected = [f"note: rescue of route chat never acts: {reason}"] if reason else []
    assert noted(pools=pools, rescue="on") == expected
    assert noted(pools=pools) == []


def test_a_monthly_cost_without_a_price_is_noted() -> None:
    """In any pool that a route of the key reaches."""
    free, paid = {**API, "price": {"output": 0}}, {**API, "model": "n"}
    keys = [{"name": "web", "sha256": "0" * 64, "monthly_cost_usd": 5}]
    expected = ["note: monthly_cost_usd of key web never limits: no pool of its routes has a price"]
    assert noted("free", pools={"free": free, "paid": paid}, keys=keys) == expected
    assert noted("free", "paid", pools={"free": free, "paid": paid}, keys=keys) == []
    assert noted(pools={"free": free}, keys=[{**keys[0], "monthly_cost_usd": None}]) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.8, "800ms"),
        (0.0005, "500us"),
        (1.0, "1s"),
        (1.5, "1.5s"),
        (90.0, "90s"),
        (300.0, "5m"),
        (7200.0, "2h"),
        (0.3, "300ms"),
    ],
)
def test_durations_are_shown_as_they_would_be_written(seconds: float, text: str) -> None:
    """The unit with the shortest text."""
    assert duration(seconds) == text


PLACED = {**ENGINE, "endpoints": [{"url": "http://a", "region": "eu"}, {"url": "http://b", "region": "us"}]}


def test_a_preferred_region_without_an_endpoint_is_noted() -> None:
    """It may be a typo, or a region of another file."""
    assert noted(pools={"one": PLACED}, region={"prefer": ["eu", "use"]}) == [
        "note: region.prefer of route chat names use, where none of its endpoints is"
    ]
    assert noted(pools={"one": PLACED}, region={"prefer": ["us", "eu"]}) == []


@pytest.mark.parametrize("prefer", ["latency", "completion", "throughput"])
def test_a_preference_by_forecast_beside_a_preferred_region_is_noted(prefer: str) -> None:
    """Parts of a tier are chosen by the forecast there; `only` holds all the same."""
    assert noted(pools={"one": PLACED}, region={"prefer": "nearest"}, prefer=prefer) == [
        f"note: prefer: {prefer} of route chat chooses by the forecast, whatever region.prefer says"
    ]
    assert noted(pools={"one": PLACED}, region={"only": ["eu"]}, prefer=prefer) == []


@pytest.mark.parametrize(
    ("pool", "defaults", "key"),
    [
        ({}, {"first_token": "5s"}, "defaults.first_token"),
        ({"first_token": "5s"}, {}, "first_token of pool own"),
        ({"first_token": "30s"}, {"first_token": "5s"}, ""),
        ({}, {}, ""),
    ],
)
def test_a_budget_above_a_limit_of_the_file_is_noted(pool: dict[str, Any], defaults: dict[str, Any], key: str) -> None:
    """The promise would never be kept beyond the limit; an assumed limit gives way."""
    routes = {"chat": {"tiers": ["own"], "ttft": {"budget": "20s"}}}
    config = {"pools": {"own": {**ENGINE, **pool}}, "routes": routes, "defaults": defaults}
    found = [line for line in notes(Config.model_validate(config)) if "first_token" in line]
    assert [line.partition(" is ")[0] for line in found] == ([f"note: {key}"] if key else [])
    assert all("is 5s, below the ttft of route chat, 20s" in line for line in found)


def test_an_api_whose_price_is_not_known_is_noted() -> None:
    """By its kind or its address. A written price is known, be it 0; callers with keys of their own pay; where callers
    choose among models there is no price to write."""
    compatible = {"backend": "compatible", "model": "m"}
    known = {**UNPRICED, "model": "gpt-6.1-sol"}
    pools = {
        "new": UNPRICED,
        "host": {**compatible, "base_url": "https://api.mistral.ai/v1"},
        "elsewhere": {**known, "base_url": "https://eu.api.openai.com/v1"},
        "known": known,
        "given": {**UNPRICED, "model": "n", "price": {"input": 0}},
        "callers": {**UNPRICED, "model": "o", "api_key": "caller"},
        "any": {"backend": "groq", "api_key": KEY, "models": ["*"]},
        "unknown": {**compatible, "base_url": "https://models.example.com/v1"},
        "own": ENGINE,
    }
    assert [note for note in notes(Config.model_validate({"pools": pools})) if "price" in note] == [
        "note: answers of new, host, elsewhere cost nothing here: no price of theirs is known; write price, in USD per"
        " million tokens"
    ]
