"""Prices of the rows: of one name, at the API of its maker, dated."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from backends.facts.fact_rows import families
from backends.facts.listed_price import ListedPrice, Rates, in_force, prices_of
from backends.facts.lookup import listed_prices, maker_at, model_row

DAY = date(2026, 11, 28)
LISTED = [(row, name) for rows in families().values() for row in rows for name in row.prices]
DATED = [{"input": 0.75, "output": 3.75}, {"from": date(2027, 1, 1), "input": 1.5, "output": 7.5}]


@pytest.mark.parametrize(("row", "name"), LISTED, ids=[name for _, name in LISTED])
def test_a_listed_price_can_be_found_and_has_a_source(row: Any, name: str) -> None:
    """By the row of the model itself, as no row before it holds; nothing is free, and no cached token is dearer than
    a read one."""
    prices = listed_prices(row.family, name)
    assert model_row(row.family, name) == row
    assert prices == row.prices[name]
    for price in prices:
        for rates in (price, *([] if price.long is None else [price.long])):
            assert 0 < (rates.cached_input or rates.input) <= rates.input <= rates.output
        assert price.source in ("S", "T")
        assert price.long is None or price.long.input > price.input


@pytest.mark.parametrize(
    ("api", "model"),
    [
        ("openai", "gpt-6.9-sol"),  # a newer version has the row of the newest, not its price
        ("openai", "gpt-6.1-sol-mini"),
        ("openai", "gpt-4o-2024-05-13"),  # cost twice as much
        ("openai", "ft:gpt-4.1"),
        ("anthropic", "claude-opus-5-6"),
        ("anthropic", "claude-opus-5-6-20261201"),
        ("anthropic", "claude-opus-latest"),  # moves on to another price
        ("azure", "gpt-6.1-sol"),
        ("openrouter", "openai/gpt-6.1-sol"),
        ("vllm", "gpt-6.1-sol"),
    ],
)
def test_a_price_is_of_one_name_at_the_api_of_its_maker(api: str, model: str) -> None:
    assert listed_prices(api, model) == ()


@pytest.mark.parametrize(
    ("api", "model"),
    [("openai", "gpt-6.1-sol"), ("gemini", "models/gemini-3.8-flash"), ("groq", "openai/gpt-oss-120b")],
)
def test_a_name_may_have_a_path(api: str, model: str) -> None:
    assert listed_prices(api, model)


@pytest.mark.parametrize(
    ("api", "model", "like"),
    [
        ("openai", "gpt-6.1-sol-2026-10-01", "gpt-6.1-sol"),
        ("anthropic", "claude-opus-5-5-20260922", "claude-opus-5-5"),
        ("anthropic", "anthropic/claude-sonnet-5-5-latest", "claude-sonnet-5-5"),
        ("gemini", "models/gemini-3.8-flash-latest", "gemini-3.8-flash"),
    ],
)
def test_a_dated_name_and_latest_cost_what_their_name_costs(api: str, model: str, like: str) -> None:
    """Unless the row has prices of other dates: these differ in places."""
    assert listed_prices(api, model) == listed_prices(api, like) != ()
    assert listed_prices("openai", "gpt-4o-2024-08-06") != ()
    assert listed_prices("openai", "gpt-4o-2024-05-13") == ()


def test_an_api_is_at_its_own_host_alone() -> None:
    """Regions of it, and resources at a cloud, have prices of their own."""
    assert [maker_at(host) for host in ("api.openai.com", "API.OpenAI.com")] == ["openai", "openai"]
    assert [maker_at(host) for host in ("eu.api.openai.com", "127.0.0.1", "")] == [None, None, None]


@pytest.mark.parametrize(("day", "usd"), [(date(2026, 12, 31), 0.75), (date(2027, 1, 1), 1.5), (date(2030, 1, 1), 1.5)])
def test_the_last_price_that_has_begun_is_in_force(day: date, usd: float) -> None:
    found = in_force(prices_of("a row", {"m": DATED})["m"], day)
    assert found is not None
    assert found.input == usd


def test_before_the_first_day_no_price_is_known() -> None:
    assert in_force(prices_of("a row", {"m": DATED[1:]})["m"], DAY) is None
    assert in_force((), DAY) is None


def test_several_names_may_have_one_price() -> None:
    long = {"input": 2, "output": 3}
    price = ListedPrice(1, 2, long_from=9, long=Rates(2, 3))
    written = {"m m-2026-01-01": {"input": 1, "output": 2, "long_from": 9, "long": long}}
    assert prices_of("a row", written) == {"m": (price,), "m-2026-01-01": (price,)}


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({"input": 1}, "missing required field `output`"),
        ({"input": -1, "output": 1}, "Expected `float` >= 0"),
        ({"input": 1, "output": 1, "cached": 1}, "unknown field `cached`"),
        ({"input": 1, "output": 1, "long_from": 5}, "long and long_from belong together"),
        ([DATED[0], DATED[0]], "each but the first is `from` a day on"),
        ([DATED[1], DATED[0]], "each but the first is `from` a day on"),
        ([], "there is none"),
        ("free", "Expected `object`"),
    ],
)
def test_a_price_that_is_none_is_refused(written: Any, told: str) -> None:
    """With the row and the names, as `facts update` tells it."""
    with pytest.raises(ValueError, match=f"^a row: prices of m n: .*{told}"):
        prices_of("a row", {"m n": written})
