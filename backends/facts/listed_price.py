"""Prices of models at their makers' APIs: the column `prices` of models.yaml.

A price belongs to an exact model name: newer versions, variants and tuned models have prices of their own. A name may
have several prices in order, each `from` a day (UTC) on; the first may have no day.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Annotated, Any

import msgspec

Usd = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """USD per million tokens. None: as `policies.types.Price` says."""

    input: Usd
    output: Usd
    cached_input: Usd | None = None
    cache_write: Usd | None = None
    cache_write_1h: Usd | None = None


class ListedPrice(Rates, frozen=True, forbid_unknown_fields=True):
    """`long`: rates of all tokens of a request with at least `long_from` prompt tokens."""

    source: str = "T"  # mark explained in models.yaml
    since: date | None = msgspec.field(name="from", default=None)
    long_from: Annotated[int, msgspec.Meta(ge=1)] | None = None
    long: Rates | None = None


Prices = Mapping[str, Sequence[ListedPrice]]  # by a model's name in lower case


def prices_of(row: str, written: Mapping[str, Any]) -> Prices:
    """`written`: prices by names, several of them separated by spaces. Raises ValueError, TypeError."""
    found: dict[str, Sequence[ListedPrice]] = {}
    for names, said in written.items():
        prices = [_price(f"{row}: prices of {names}", one) for one in (said if isinstance(said, list) else [said])]
        if not prices:
            raise ValueError(f"{row}: prices of {names}: there is none")
        days = [price.since or date.min for price in prices]
        if days != sorted(set(days)):
            raise ValueError(f"{row}: prices of {names}: each but the first is `from` a day on, in order")
        found |= dict.fromkeys(names.lower().split(), tuple(prices))
    return found


def in_force(prices: Sequence[ListedPrice], day: date) -> ListedPrice | None:
    """The price valid on a day: the latest that has begun. None: no price has begun."""
    begun = [price for price in prices if price.since is None or price.since <= day]
    return begun[-1] if begun else None


def _price(place: str, written: Any) -> ListedPrice:
    try:
        price = msgspec.convert(written, ListedPrice)
    except msgspec.ValidationError as error:
        raise ValueError(f"{place}: {error}") from None
    if (price.long is None) != (price.long_from is None):
        raise ValueError(f"{place}: long and long_from belong together")
    return price
