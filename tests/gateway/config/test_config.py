"""The validated configuration and the values built from the configuration."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.config.models import Config
from gateway.config.pool_section import ENCODINGS
from gateway.tokenize.tokenizers import ALIASES, PATTERNS
from policies import types
from policies.routes.route import Route

VLLM = {"backend": "vllm", "model": "qwen3-8b", "endpoints": ["http://10.0.0.11:8000"]}


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


def pool(**fields: Any) -> Config:
    return config(pools={"small": VLLM | fields})


def route(text: dict[str, Any], **sections: Any) -> Route:
    return config(pools={"small": VLLM}, routes={"r": {"tiers": ["small"], **text}}, **sections).routes["r"]


def test_defaults_are_those_of_the_contract() -> None:
    """Defaults: loopback, a single process, and no unlimited wait."""
    empty = config()
    assert (str(empty.server.listen), str(empty.server.admin), empty.server.workers) == (
        "127.0.0.1:8080",
        "127.0.0.1:9090",
        1,
    )
    assert empty.defaults.model_dump() == {
        "connect": 2.0,
        "stream_idle": 30.0,
        "first_token": 60.0,
        "max_attempts": 3,
        "max_body": 32_000_000,
        "scrape": 0.5,
        "keepalive": "off",
    }
    assert (empty.state.redis, empty.keys, empty.telemetry.access_log, empty.telemetry.prompts) == (
        None,
        (),
        "stdout",
        "never",
    )


def test_a_pool_becomes_policy_input() -> None:
    """A pool becomes policy input with every field; endpoint ids consist of pool, host and port."""
    fleet = pool(
        endpoints=["http://10.0.0.11:8000/", {"url": "https://b.example/v1", "region": "eu-west"}],
        context_window=32768,
        capabilities=["tools"],
        price={"input": 0.05, "output": 0.2},
        block_size=32,
    ).fleet()
    assert fleet == (
        types.Pool(
            name="small",
            model="qwen3-8b",
            endpoints=(
                types.Endpoint("small/10.0.0.11:8000", "small"),
                types.Endpoint("small/b.example:443", "small", "eu-west"),
            ),
            local=True,
            context_window=32768,
            capabilities=frozenset({"tools"}),
            price=types.Price(0.05, 0.2),
            block_size=32,
        ),
    )


def test_every_endpoint_has_a_url() -> None:
    """URLs are keyed by endpoint id; IPv6 keeps the brackets."""
    both = config(
        pools={"small": VLLM | {"endpoints": ["http://[::1]:8000/"]}, "api": {"backend": "openai", "api_key": "k"}}
    )
    ids = {endpoint.id for pool in both.fleet() for endpoint in pool.endpoints}
    assert both.urls() == {
        "small/[::1]:8000": "http://[::1]:8000",
        "api/api.openai.com:443": "https://api.openai.com/v1",
    }
    assert ids == set(both.urls())


def test_base_url_overrides_the_default_of_an_api() -> None:
    """`base_url` replaces the backend's default."""
    moved = config(pools={"api": {"backend": "openai", "api_key": "k", "base_url": "http://127.0.0.1:9/v1"}})
    assert (moved.urls(), moved.fleet()[0].local) == ({"api/127.0.0.1:9": "http://127.0.0.1:9/v1"}, False)


def test_an_authorization_header_replaces_the_api_key() -> None:
    """Some proxies use another authorization scheme."""
    headers = {"Authorization": "Basic x", "X-Team": "a"}
    built = config(pools={"api": {"backend": "openai", "model": "m", "headers": headers}}).pools["api"].backend_config()
    assert (built.kind, built.model, built.api_key) == ("openai", "m", "")
    assert built.headers == {"authorization": "Basic x", "x-team": "a"}


def test_secrets_are_in_no_dump_and_no_repr() -> None:
    """The admin port shows the configuration."""
    secret = "sk-canary-0123456789"
    shown = config(
        pools={"api": {"backend": "openai", "api_key": secret, "headers": {"x-key": secret}}},
        state={"redis": f"redis://:{secret}@localhost", "cache_secret": secret},
    )
    assert secret not in shown.model_dump_json() + repr(shown)
    assert shown.pools["api"].backend_config().api_key == secret


def test_the_configuration_can_be_shown() -> None:
    """A dump is plain JSON; addresses keep the written form."""
    shown = config(server={"listen": "[::1]:80"}, pools={"small": VLLM}).model_dump(mode="json")
    assert (shown["server"]["listen"], shown["pools"]["small"]["endpoints"][0]["url"]) == (
        "[::1]:80",
        "http://10.0.0.11:8000",
    )


def test_a_configuration_is_immutable() -> None:
    """A reload builds a new configuration."""
    with pytest.raises(ValidationError):
        config().server.workers = 2


def test_the_name_of_a_route_is_its_key() -> None:
    """The key of a route is the model name in requests."""
    assert route({}).name == "r"


def test_a_workload_fills_missing_keys_of_the_route() -> None:
    """A preset never overrides the route; the default workload is chat."""
    assert route({"ttft": {"budget": "250ms"}}).ttft == route({"workload": "chat", "ttft": {"budget": "250ms"}}).ttft
    agent = route({"workload": "agent", "ttft": {"target": 0.5}})
    assert agent.ttft is not None
    assert agent.total is not None
    assert (agent.ttft.budget, agent.ttft.target, agent.total.budget) == (3.0, 0.5, 30.0)


def test_defaults_fill_keys_missing_in_route_and_workload() -> None:
    """`defaults` may come after `routes` in the file."""
    assert route({}, defaults={"max_attempts": 5}).max_attempts == 5
    assert route({"max_attempts": 2}, defaults={"max_attempts": 5}).max_attempts == 2


def test_passthrough_is_a_route_of_its_own() -> None:
    """The route's name is fixed: model names of callers never become a metric label."""
    through = config(
        pools={"api": {"backend": "openai", "api_key": "k"}}, passthrough="api", defaults={"max_attempts": 1}
    ).passthrough_route
    assert through is not None
    assert (through.name, [tier.pool for tier in through.tiers], through.workload, through.max_attempts) == (
        "passthrough",
        ["api"],
        "chat",
        1,
    )
    assert config().passthrough_route is None


def test_the_encodings_are_those_of_the_tokenizers() -> None:
    """The list is repeated in a module that must not import the encoders."""
    assert set(ENCODINGS) == PATTERNS.keys() | ALIASES.keys()


def test_workers_share_the_limits_per_minute_of_a_pool() -> None:
    """Each counts what it sends itself."""
    pools = {"p": {"backend": "compatible", "endpoints": ["http://a"], "requests_per_minute": 10}}
    config = Config.model_validate({"pools": pools, "passthrough": "p"})
    assert [config.with_workers(count).fleet()[0].requests_per_minute for count in (1, 4)] == [10, 2.5]


def test_engines_have_no_limits_per_minute() -> None:
    """Their load is known; a cap on the requests in progress bounds it."""
    pools = {"p": {"backend": "vllm", "endpoints": ["http://a"], "tokens_per_minute": 10}}
    with pytest.raises(ValidationError, match="vllm servers are limited by concurrent_requests"):
        Config.model_validate({"pools": pools, "passthrough": "p"})
