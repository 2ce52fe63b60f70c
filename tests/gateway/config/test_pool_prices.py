"""Price of a pool: as written, else that of its model at the API that its servers are."""

from __future__ import annotations

from datetime import date

import pytest

from gateway.config import pool_section
from gateway.config.loading import change
from gateway.config.models import Config
from gateway.config.pool_section import PoolSection
from policies.types import Price, PromptCacheTerms

KEY = "sk-0123456789abcdef"
SOL = {"model": "gpt-6.1-sol", "api_key": KEY}
SPEEDS = {"flex": 0.5, "fast": 2, "priority": 2, "scale": 1, "ultrafast": 6}
SOL_PRICE = Price(2, 10, 0.1, 2.5, long=(272_001, Price(4, 15, 0.2, 5)), speeds=SPEEDS)
FLASH_SPEEDS = {"flex": 0.5, "priority": 1.8}
FLASH = {"backend": "gemini", "model": "gemini-3.8-flash", "api_key": KEY}


def config(**pool: object) -> Config:
    return Config.model_validate({"pools": {"p": pool}, "passthrough": "p"})


def section(**pool: object) -> PoolSection:
    return config(**pool).pools["p"]


def price(**pool: object) -> Price:
    """As decisions, quotas and costs have it."""
    return config(**pool).fleet()[0].price


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    on(monkeypatch, date(2026, 12, 31))
    return monkeypatch


def on(monkeypatch: pytest.MonkeyPatch, day: date) -> None:
    monkeypatch.setattr(pool_section, "today", lambda: day)


@pytest.mark.parametrize(
    "server",
    [
        {"backend": "openai"},
        {"backend": "compatible", "base_url": "https://api.openai.com/v1"},
        {"backend": "openai", "endpoints": ["https://api.openai.com/v1"]},
    ],
)
def test_a_model_at_the_api_of_its_maker_costs_what_is_known(server: dict[str, object]) -> None:
    """By the kind of the pool, or by its address."""
    assert price(**server, **SOL) == SOL_PRICE


@pytest.mark.parametrize(
    "server",
    [
        {"backend": "vllm", "endpoints": ["http://10.0.0.1:8000"]},
        {"backend": "compatible", "base_url": "https://models.example.com/v1"},
        {"backend": "openai", "base_url": "http://127.0.0.1:8000"},
        {"backend": "openai", "base_url": "https://eu.api.openai.com/v1"},
        {"backend": "openrouter"},
        {"backend": "openai", "endpoints": ["https://api.openai.com/v1", "http://127.0.0.1:8000"]},
    ],
)
def test_a_model_of_the_same_name_elsewhere_costs_nothing(server: dict[str, object]) -> None:
    """An engine of one's own, an unknown host, a region and a reseller have other prices."""
    assert price(**server, **SOL) == Price()


@pytest.mark.parametrize("written", [{"input": 1, "output": 3}, {"input": 0}])
def test_a_written_price_wins(written: dict[str, float]) -> None:
    """One of 0 too: what is not written in it costs nothing."""
    speeds = SPEEDS if written["input"] else {}
    assert price(backend="openai", price=written, **SOL) == Price(
        written["input"], written.get("output", 0), speeds=speeds
    )


def test_a_speed_has_the_price_that_its_pool_or_else_its_model_states() -> None:
    """As a factor. Others than the named ones cost what the standard costs."""
    own = price(backend="openai", accepts={"speeds": {"priority": 2.2}}, **SOL)
    assert (own.factor("priority"), own.factor("flex"), own.factor("")) == (2.2, 1, 1)
    assert price(backend="openai", **{**SOL, "model": "gpt-5.5"}).factor("priority") == 2.5
    assert price(backend="anthropic", model="claude-opus-5-5", api_key=KEY).factor("fast") == 2
    assert price(backend="anthropic", model="claude-haiku-4-5", api_key=KEY).factor("fast") == 1


def test_where_callers_pay_or_choose_the_model_nothing_is_assumed() -> None:
    assert price(backend="openai", **{**SOL, "api_key": "caller"}) == Price()
    assert price(backend="openai", models=["*"], **SOL) == Price()


def test_a_price_changes_on_its_day(day: pytest.MonkeyPatch) -> None:
    """The file is the same, and a reload tells the change."""
    before = config(**FLASH)
    assert before.fleet()[0].price == Price(0.75, 3.75, 0.075, speeds=FLASH_SPEEDS)
    assert not before.pools["p"].is_repriced_on(date(2026, 12, 31))
    assert before.pools["p"].is_repriced_on(date(2027, 1, 1))
    assert change(before, config(**FLASH)).changed == ()
    on(day, date(2027, 1, 1))
    found = change(before, config(**FLASH))
    assert found.changed == ("pools.p.price",)
    assert found.config.fleet()[0].price == Price(1.5, 7.5, 0.15, speeds=FLASH_SPEEDS)


def test_a_written_price_has_no_day(day: pytest.MonkeyPatch) -> None:
    written = section(**FLASH, price={"input": 1})
    assert not written.is_repriced_on(date(2027, 1, 1))
    assert change(config(**FLASH), config(**FLASH, price={})).changed == ("pools.p.price",)


# --------------------------------------------------------------------------- what is cached there


FABLE = {"backend": "anthropic", "model": "claude-fable-5-1", "api_key": KEY}
CACHED = {"input": 1.0, "cached_input": 0.1, "output": 4.0}


def kept(**pool: object) -> PromptCacheTerms | None:
    """Terms of the prompt cache, as decisions have them."""
    return config(**pool).fleet()[0].prompt_cache


@pytest.mark.parametrize(
    ("pool", "terms"),
    [
        ({"backend": "openai", **SOL}, PromptCacheTerms(1800, 1024)),
        ({"backend": "openai", **SOL, "model": "gpt-5.5"}, PromptCacheTerms(300, 1024)),
        ({**FABLE, "price": CACHED}, PromptCacheTerms(300, 512)),
        ({**FABLE, "model": "claude-opus-4-7", "price": CACHED}, PromptCacheTerms(300, 2048)),
        ({**FABLE, "model": "claude-opus-4-6", "price": CACHED}, PromptCacheTerms(300, 4096)),
        (FLASH, PromptCacheTerms(300, 4096)),
        ({"model": "m", "base_url": "https://api.deepseek.com", "price": CACHED}, PromptCacheTerms(3600, 64)),
    ],
)
def test_a_known_api_keeps_prompts_by_the_rows_of_the_api_and_of_the_model(
    pool: dict[str, object], terms: PromptCacheTerms
) -> None:
    """For how long after their latest use, and from how many tokens on."""
    assert kept(**{"backend": "compatible", **pool}) == terms


@pytest.mark.parametrize(
    "pool",
    [
        {**FABLE, "price": CACHED, "prompt_caching": "off"},  # its requests have no breakpoint
        {"backend": "openai", **SOL, "price": {"input": 1.0}},  # cached ones cost no less
        {"backend": "openai", **SOL, "price": {"input": 1.0, "cached_input": 1.0}},
        {"backend": "compatible", **SOL, "base_url": "https://api.example.com/v1", "price": CACHED},  # known model
        {"backend": "vllm", "model": "m", "endpoints": ["http://10.0.0.1:8000"], "price": CACHED},
    ],
)
def test_nothing_is_believed_of_other_prompt_caches(pool: dict[str, object]) -> None:
    """Where nothing is known of the API, or nothing would be saved."""
    assert kept(**pool) is None


def test_a_pool_may_tell_what_its_api_keeps() -> None:
    """In `accepts`, as any other fact: retention of a day was bought."""
    said = {"caching": "implicit", "cache_ttl": 86_400, "cache_from": 256}
    unknown = {"backend": "compatible", "model": "m", "base_url": "https://api.example.com/v1", "price": CACHED}
    assert kept(**unknown, accepts=said) == PromptCacheTerms(86_400, 256)
