"""Values derived from a configuration, and objects shared by successive Runtimes."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.admission.auth import ANYONE
from gateway.config.models import Config, Key
from gateway.runtime import build_runtime
from policies.types import Price
from tests.support.gateways import document, pool

PRICE = {"input": 1.0, "output": 2.0}


def test_prices_are_per_pool() -> None:
    """Not that of the first choice."""
    pools = {"small": pool("http://127.0.0.1:9", price=PRICE), "large": pool("http://127.0.0.1:9")}
    runtime = build_runtime(Config.model_validate(document(pools)))
    assert runtime.pools["small"].price == Price(1.0, 2.0)
    assert runtime.pools["large"].price == Price()


def test_unchanged_pools_keep_their_objects_in_the_next_runtime() -> None:
    """Connections and backends outlive a reload; new and removed pools share none."""
    both = {"a": pool("http://127.0.0.1:1"), "b": pool("http://127.0.0.1:2")}
    before = build_runtime(Config.model_validate(document(both)))
    changed = {"a": pool("http://127.0.0.1:1", price=PRICE), "b": pool("http://127.0.0.1:3")}
    after = build_runtime(Config.model_validate(document(changed)), before)
    old, new = list(before.upstreams.values()), list(after.upstreams.values())
    assert (new[0].connections is old[0].connections, new[1].connections is old[1].connections) == (True, False)
    assert [after.backends[pool] is before.backends[pool] for pool in before.backends] == [True, True]


ROUTES = {"chat": {"tiers": ["a"]}, "other": {"tiers": ["b"]}}


@pytest.mark.parametrize(
    ("pool_a", "routes", "replaced"),
    [
        ({}, ROUTES, set()),
        ({"price": PRICE, "endpoints": ["http://127.0.0.1:3"]}, ROUTES, set()),
        ({"tokenizer": "cl100k_base"}, ROUTES, {"chat"}),
        ({"backend": "anthropic", "api_key": "k"}, ROUTES, {"chat"}),
        ({}, {**ROUTES, "chat": {"tiers": ["b"]}}, {"chat"}),
        ({}, {**ROUTES, "chat": {"tiers": ["a"], "ttft": {"budget": "2s"}}}, {"chat"}),
        ({}, {"other": ROUTES["other"]}, {"chat"}),
    ],
)
def test_a_route_is_replaced_if_an_estimate_or_a_decision_may_differ(
    pool_a: dict[str, Any], routes: dict[str, Any], replaced: set[str]
) -> None:
    """By its settings, or by the tokenizer or dialect of a pool. Every decision reads endpoints and prices anew."""
    pools = {"a": pool("http://127.0.0.1:1"), "b": pool("http://127.0.0.1:2")}
    before = build_runtime(Config.model_validate(document(pools, ROUTES)))
    after = build_runtime(Config.model_validate(document({**pools, "a": {**pools["a"], **pool_a}}, routes)), before)
    assert after.replaced_routes(before) == replaced


URL, OTHER_URL = "http://127.0.0.1:1", "http://127.0.0.1:2"
API: dict[str, Any] = {"backend": "openai", "model": "gpt", "api_key": "sk-1"}
TWO_TENANTS = {"a": ["one"], "b": ["two"]}  # routes by key


@pytest.mark.parametrize(
    ("pools", "keys", "masked"),
    [
        ({"one": pool(URL), "two": pool(OTHER_URL)}, TWO_TENANTS, set()),
        ({"one": pool(URL), "two": pool(OTHER_URL)}, {"a": None, "b": ["two"]}, {"two"}),
        ({"one": pool(URL), "two": pool(OTHER_URL)}, {"a": None, "b": None}, {"one", "two"}),
        ({"one": pool(URL), "two": pool(URL)}, TWO_TENANTS, {"one", "two"}),  # one server under two names
        ({"one": pool(URL), "two": pool(URL, model="other")}, TWO_TENANTS, set()),  # a cache per model
        ({"one": pool(URL), "two": pool(URL, model="")}, TWO_TENANTS, {"one", "two"}),  # any model
        ({"one": pool(URL), "two": pool(URL, api_key="sk-2")}, TWO_TENANTS, {"one", "two"}),  # an engine of ours
        ({"one": API, "two": API}, TWO_TENANTS, {"one", "two"}),
        ({"one": API, "two": {**API, "api_key": "sk-2"}}, TWO_TENANTS, set()),  # two accounts at a provider
        ({"one": pool(URL), "two": pool(URL)}, {"a": ["one"], "b": []}, set()),
        ({"one": pool(URL, backend="vllm"), "two": pool(URL, backend="vllm")}, TWO_TENANTS, set()),  # salted
        ({"one": API, "two": {**API, "model": "unlike"}}, {"a": ["one"], "b": ["passthrough"]}, {"one", "two"}),
    ],
)
def test_counts_are_masked_where_cache_groups_meet(
    pools: dict[str, Any], keys: dict[str, list[str] | None], masked: set[str]
) -> None:
    """In one cache: of a server, a credential and a model."""
    routes = {name: {"tiers": [name]} for name in pools}
    listed = [
        {"name": name, "sha256": f"{i:064x}"} | ({} if allowed is None else {"routes": allowed or ["neither"]})
        for i, (name, allowed) in enumerate(keys.items())
    ]
    config = Config.model_validate(document(pools, routes, keys=listed, passthrough="two"))
    assert build_runtime(config).masked_pools == masked


def test_keys_of_redis_count_as_the_file_s_do() -> None:
    """Two keys in Redis, two groups."""
    runtime = build_runtime(
        Config.model_validate(document({"one": pool(URL)}, state={"redis": "redis://x", "keys": "redis"}))
    )
    stored = [Key(name=name, sha256=f"{i:064x}") for i, name in enumerate("ab")]
    assert [runtime.with_stored_keys(stored[:n]).masked_pools for n in range(3)] == [set(), set(), {"one"}]


def test_the_endpoints_of_a_route_are_those_that_it_may_use() -> None:
    """State that is kept in another region is not found by its id. Of several routes, those of any."""
    placed = [{"url": "http://127.0.0.1:1", "region": "eu"}, {"url": "http://127.0.0.1:2", "region": "us"}]
    pools = {"a": {**pool(), "endpoints": placed}}
    routes = {"eu": {"tiers": ["a"], "region": {"only": ["eu"]}}, "any": {"tiers": ["a"]}}
    runtime = build_runtime(Config.model_validate(document(pools, routes)))
    strict, free = (next(one for one in runtime.routes.all if one.name == name) for name in ("eu", "any"))
    assert runtime.endpoints(strict) == ["a/127.0.0.1:1"]
    assert runtime.endpoints(strict, free) == runtime.endpoints(free) == ["a/127.0.0.1:1", "a/127.0.0.1:2"]


def test_a_window_is_known_by_the_facts_of_the_model_that_the_caller_names() -> None:
    """Where the pool states none; of an unknown model it is unknown. No request is refused for it."""
    pools = {
        "any": pool("http://127.0.0.1:1", backend="anthropic", api_key="k", model=""),
        "own": pool("http://127.0.0.1:2", backend="anthropic", api_key="k", model="claude-haiku-4-5"),
        "stated": pool("http://127.0.0.1:3", backend="anthropic", api_key="k", model="m", context_window=9000),
    }
    routes = {"own": {"tiers": ["own"]}, "stated": {"tiers": ["stated"]}}
    runtime = build_runtime(Config.model_validate(document(pools, routes, passthrough="any")))
    names = ("claude-opus-5-5", "nobody", "own", "stated")
    assert [runtime.context_window(name, ANYONE) for name in names] == [1_000_000, None, 200_000, 9000]
    assert runtime.pools["own"].context_window is None
