"""Output of `firsttoken check`."""

from __future__ import annotations

import pytest

from gateway.cli.config_commands import duration, notes, report
from gateway.config.models import Config

FLEET = {
    "small": {"backend": "vllm", "model": "m", "endpoints": ["http://a", "http://b"]},
    "large": {"backend": "ollama", "model": "m"},
}


def test_the_report_shows_routes_and_budgets() -> None:
    """Counts first, then a line per route, in columns."""
    config = Config.model_validate(
        {
            "pools": FLEET,
            "routes": {
                "chat": {
                    "ttft": {"budget": "800ms", "target": 0.95},
                    "tiers": ["large", {"pool": "small", "when": {"prompt_tokens": "<= 8000", "tools": False}}],
                },
                "night": {"workload": "batch", "tiers": ["small"], "rescue": "on"},
            },
            "passthrough": "small",
        }
    )
    assert report(config).splitlines() == [
        "ok: 2 pools, 3 endpoints, 2 routes",
        "route        workload  ttft          tpot  total  tiers",
        "chat         chat      800ms at 95%  50ms  -      large > small (prompt_tokens <= 8000, tools false)",
        "night        batch     -             -     -      small",
        "(any other)  chat      1s at 90%     50ms  -      small",
    ]


def test_a_count_of_one_is_singular() -> None:
    """Singular nouns after a count of 1."""
    config = Config.model_validate({"pools": {"large": FLEET["large"]}, "routes": {"r": {"tiers": ["large"]}}})
    assert report(config).splitlines()[0] == "ok: 1 pool, 1 endpoint, 1 route"


def test_a_public_admin_port_is_noted() -> None:
    """A public admin port shows everything, but Prometheus on another machine may need the port."""
    config = Config.model_validate({"server": {"admin": "0.0.0.0:9090"}})
    assert notes(config) == ["note: server.admin 0.0.0.0:9090 requires no key; keep it on a private network"]


@pytest.mark.parametrize(
    ("state", "noted"),
    [
        ({"keys": "redis"}, True),
        ({"keys": "redis", "cache_secret": "a configured secret"}, False),
        ({"keys": "config"}, False),
    ],
)
def test_keys_in_redis_without_cache_secret_are_noted(state: dict[str, str], noted: bool) -> None:
    """Members of a cache group in Redis change at runtime, and without a configured secret so does the caches' salt."""
    config = Config.model_validate({"state": {"redis": "redis://127.0.0.1/0", **state}})
    expected = (
        "note: keys in Redis that share a cache_group need state.cache_secret: without it every key that joins or"
        " leaves the group empties its caches"
    )
    assert notes(config) == ([expected] if noted else [])


def test_a_limit_in_usd_at_an_api_without_a_price_is_noted() -> None:
    """It costs nothing by the configuration. Engines of one's own need no price."""
    api = {"backend": "openai", "model": "m", "api_key": "k", "endpoints": ["https://api.openai.com/v1"]}
    pools = {"own": {"backend": "vllm", "model": "m", "endpoints": ["http://h"]}, "free": api}
    pools["paid"] = {**api, "price": {"input": 1}}
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

    def pool(*profiles: str | None, **more: str) -> dict[str, object]:
        named = [{"url": f"http://h{i}", **({"profile": name} if name else {})} for i, name in enumerate(profiles)]
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
