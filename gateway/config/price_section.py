"""Price of a pool: as written, or as the facts have it of the model at the API of its maker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from urllib.parse import urlsplit

from pydantic import Field

from backends.facts.listed_price import ListedPrice, Rates, in_force
from backends.facts.lookup import listed_prices, maker_at
from backends.facts.model_facts import Caching, Facts
from gateway.config.field_types import Section
from policies.types import Price, PromptCacheTerms


class PriceSection(Section):
    """USD per million tokens."""

    input: float = Field(default=0.0, ge=0)
    cached_input: float | None = Field(default=None, ge=0)
    """Of input that the provider reports as read from its cache; absent: as input."""
    cache_write: float | None = Field(default=None, ge=0)
    """Of input that the provider reports as written into its cache; absent: as input."""
    cache_write_1h: float | None = Field(default=None, ge=0)
    """Of input written into its cache for an hour or longer; absent: twice input beside a `cache_write` above input."""
    output: float = Field(default=0.0, ge=0)

    @property
    def value(self) -> Price:
        return Price(self.input, self.output, self.cached_input, self.cache_write, self.cache_write_1h)


def today() -> date:
    """Prices change at the beginning of a day (UTC)."""
    return datetime.now(UTC).date()


def listed(urls: Iterable[str], model: str, day: date) -> Price | None:
    """In force on a day. None: the servers are not all the API of the model's maker, or no price is known."""
    apis = {maker_at(urlsplit(url).hostname or "") for url in urls}
    api = apis.pop() if len(apis) == 1 else None
    found = None if api is None else in_force(listed_prices(api, model), day)
    return None if found is None else _with_long(found)


def with_speeds(price: Price, speeds: Mapping[str, float] | None) -> Price:
    """`speeds`: as `Facts.speeds`."""
    return replace(price, speeds=speeds) if speeds and price != Price() else price


def prompt_cache(price: Price, facts: Facts, *, marks: bool) -> PromptCacheTerms | None:
    """`marks`: requests carry breakpoints. None: not known, or a prompt that is kept costs no less."""
    if facts.cache_ttl is None or price.cached_input is None or price.cached_input >= price.input:
        return None
    is_kept = facts.caching is Caching.IMPLICIT or (facts.caching is Caching.MARKED and marks)
    return PromptCacheTerms(facts.cache_ttl, facts.cache_from or 0) if is_kept else None


def _with_long(found: ListedPrice) -> Price:
    long = None if found.long is None or found.long_from is None else (found.long_from, _price(found.long))
    return replace(_price(found), long=long)


def _price(rates: Rates) -> Price:
    return Price(rates.input, rates.output, rates.cached_input, rates.cache_write, rates.cache_write_1h)
