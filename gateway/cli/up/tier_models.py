"""Chooses models for the routes `best`, `balanced` and `fast` from the models that the servers list.

- API: the newest large model and the newest small model, by the fact rows (`backends/facts/models.yaml`, rules in its
  section `tiers`). Previews and models close to shutdown are the last choice.
- API with unknown model names: its first model, only if the API lists few models or no other server has a model.
- Local server: the loaded model, or else the first listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from math import inf

from backends.facts.fact_rows import tier_rules
from backends.facts.lookup import facts_of, is_own, model_row, plain, version_of
from backends.facts.model_facts import Facts
from gateway.cli.up.known_servers import FoundServer, Reach

FEW = 3  # models of an API with names that no row knows
GONE = "gone"
Rank = tuple[bool, bool, float, tuple[float, ...], bool, int]


def large_model(found: FoundServer, today: date) -> str:
    """The newest of the largest models of an API; empty: none is known."""
    if newest := _newest(found, tier_rules().best, today):
        return newest
    small = small_model(found, today)
    answering = [name for name in found.models if not _embeds(name) and name != small]
    return answering[0] if answering and len(found.models) <= FEW else ""


def small_model(found: FoundServer, today: date) -> str:
    """The newest of the small models of an API; empty: none is known."""
    return _newest(found, tier_rules().fast, today)


def local_model(found: FoundServer) -> str:
    """The loaded or first model of a server of this machine; empty: there is none."""
    return found.loaded or next((name for name in found.models if not _embeds(name)), "")


def tier_models(found: FoundServer, today: date | None = None) -> dict[str, str]:
    """Model by the ending of its pool's name: `-best` and `-fast` of an API, none of a server of this machine."""
    if found.reach is not Reach.OK:
        return {}
    if not found.is_api:
        chosen = {"": local_model(found)}
    else:
        day = today or datetime.now(UTC).date()
        chosen = {"-best": large_model(found, day), "-fast": small_model(found, day)}
    return {ending: model for ending, model in chosen.items() if model}


def models_of_tiers(found: Sequence[FoundServer]) -> dict[str, dict[str, str]]:
    """By the name of the server, as `tier_models`. There is a tier wherever there is a model that answers."""
    tiers = {each.server.name: tier_models(each) for each in found}
    if not any(tiers.values()) and (first := next(filter(_first_model, quality_order(found)), None)):
        tiers[first.server.name] = {"-best": _first_model(first)}
    return tiers


def quality_order(found: Sequence[FoundServer]) -> list[FoundServer]:
    """APIs as in the rules of tiers, then all others as given."""
    order = tier_rules().order
    return sorted(found, key=lambda each: order.index(each.kind) if each.kind in order else len(order))


def _first_model(found: FoundServer) -> str:
    """The first model that an API lists, but for embeddings; empty: there is none."""
    is_listed = found.is_api and found.reach is Reach.OK
    return next((name for name in found.models if is_listed and not _embeds(name)), "")


def _embeds(name: str) -> bool:
    return re.search(tier_rules().embeddings, name) is not None


def _newest(found: FoundServer, sizes: tuple[float, float], today: date) -> str:
    """The largest between `sizes`, of these the newest."""
    ranks = {name: _rank(found.kind, name, sizes, today) for name in found.models if is_own(found.kind, name)}
    known: Mapping[str, Rank] = {name: rank for name, rank in ranks.items() if rank is not None}
    return max(known, key=known.__getitem__, default="")


def _rank(api: str, name: str, sizes: tuple[float, float], today: date) -> Rank | None:
    """Larger is better; None: not of these sizes, for other work than chats, or gone."""
    facts, rules = facts_of(api, name), tier_rules()
    if facts.size is None or not sizes[0] <= facts.size <= sizes[1] or re.search(rules.no_chat, name):
        return None
    if _left(facts, today):
        return None
    stays, is_preview = not _left(facts, today + timedelta(days=rules.leaving)), re.search(rules.previews, name)
    return stays, not is_preview, facts.size, _version(api, name), not _is_dated(name), -len(name)


def _version(api: str, name: str) -> tuple[float, ...]:
    """Order by version. An alias such as `-latest` comes after the versions of its line: its price may change."""
    row, version = model_row(api, name), version_of(name)
    return () if row is not None and row.alias is not None and version == (inf,) else version


def _left(facts: Facts, day: date) -> bool:
    """True where the name is answered no more on that day, or by another model."""
    if not facts.shutdown:
        return bool(facts.routed_to)
    return facts.shutdown == GONE or date.fromisoformat(facts.shutdown) <= day


def _is_dated(name: str) -> bool:
    """An alias goes on to the next snapshot of its version."""
    return re.search(r"\d{4}", plain(name)) is not None
