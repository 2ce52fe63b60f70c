"""Warnings of `check --live` about models that end: by the server's own list, or else by the rows of facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date, timedelta

from backends.facts.lookup import facts_of
from backends.facts.model_facts import Facts
from gateway.cli.live.live_facts import EndpointFacts
from gateway.cli.live.live_findings import Finding
from gateway.config.config_errors import dotted
from gateway.config.models import Config

AHEAD = timedelta(days=180)  # warning period before a model ends
GONE = "gone"
_LISTED, _ROW = "as its server lists", "as the facts of models have it"


def sunsets(config: Config, found: Sequence[EndpointFacts], today: date) -> Iterator[Finding]:
    """A warning for each model of a pool, however many endpoints the pool has."""
    models = dict.fromkeys((facts.pool, model) for facts in found for model in facts.models)
    for pool, model in models:
        listed = [facts.listing.ends[model] for facts in found if facts.pool == pool and model in facts.listing.ends]
        believed = facts_of(config.pools[pool].api, model, config.pools[pool].own_facts)
        if words := _listed(min(listed), today) if listed else _believed(believed, today):
            mend = f"take another model in {dotted(('pools', pool))}"
            yield Finding("sunset", f"the model '{model}' of {pool} {words}; {mend}", fault=False)


def _listed(end: date, today: date) -> str:
    return f"{_when(end, today)}, {_LISTED}" if end - today <= AHEAD else ""


def _believed(facts: Facts, today: date) -> str:
    """Words for a model's end by the fact rows; empty: no known end within AHEAD."""
    if facts.shutdown == GONE:
        return f"has ended, {_ROW}"
    heir = f" (from then on '{facts.routed_to}' answers)" if facts.routed_to else ""
    if not facts.shutdown:
        return f"is answered by '{facts.routed_to}', {_ROW}" if facts.routed_to else ""
    end = date.fromisoformat(facts.shutdown)
    return f"{_when(end, today)}{heir}, {_ROW}" if end - today <= AHEAD else ""


def _when(end: date, today: date) -> str:
    days = (end - today).days
    return f"ends on {end}, in {days} {'day' if days == 1 else 'days'}" if days > 0 else f"has ended on {end}"
