"""Output of `firsttoken check`."""

from __future__ import annotations

from gateway.cli.config_commands import report
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
