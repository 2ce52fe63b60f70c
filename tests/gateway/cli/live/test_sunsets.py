"""Ends of models, as `check --live` tells them."""

from __future__ import annotations

from datetime import date, timedelta

import pytest

from gateway.cli.live.live_facts import EndpointFacts, ListingFacts, read_ends
from gateway.cli.live.sunsets import AHEAD, sunsets
from gateway.config.loading import validated
from gateway.config.models import Config
from gateway.config.yaml_source import parse

NOVEMBER = date(2026, 11, 29)


def config(model: str, backend: str = "openai") -> Config:
    pool = f"{{backend: {backend}, model: {model}, api_key: k-0123456789}}"
    text = f"pools: {{a: {pool}}}\nroutes: {{r: {{tiers: [a], ttft: off}}}}"
    return validated(parse(text, "f.yaml", {}))


def told(model: str, listed: bytes = b'{"data": []}', backend: str = "openai") -> list[str]:
    listing = ListingFacts(200, frozenset({model}), ends=read_ends(listed))
    found = [EndpointFacts(id, "a", "https://a", (model,), False, listing) for id in ("a/1", "a/2")]
    return [one.line for one in sunsets(config(model, backend), found, NOVEMBER)]


@pytest.mark.parametrize(
    ("backend", "model", "words"),
    [
        ("openai", "gpt-4.1", "ends on 2027-01-14, in 46 days, as the facts of models have it"),
        ("openai", "o1", "has ended, as the facts of models have it"),
        ("anthropic", "claude-sonnet-4-5", "ends on 2026-11-30, in 1 day, as the facts of models have it"),
        (
            "gemini",
            "gemini-2.5-pro",
            "ends on 2026-12-01, in 2 days (from then on 'gemini-3.8-flash' answers), as the facts of models have it",
        ),
        ("deepseek", "deepseek-v4-pro", "is answered by 'deepseek-flash', as the facts of models have it"),
    ],
)
def test_an_end_that_a_row_has_is_a_warning(backend: str, model: str, words: str) -> None:
    """One for each model of a pool, with the mend."""
    assert told(model, backend=backend) == [f"warning: the model '{model}' of a {words}; take another model in pools.a"]


def test_the_servers_own_list_holds_before_the_row() -> None:
    """OpenAI's `shutdown_date`; of a model without a row too."""
    listed = (
        b'{"data": [{"id": "gpt-4.1", "shutdown_date": "2027-02-01"}, {"id": "new", "shutdown_date": "2026-11-01"}]}'
    )
    assert "ends on 2027-02-01, in 64 days, as its server lists" in told("gpt-4.1", listed)[0]
    assert "has ended on 2026-11-01, as its server lists" in told("new", listed)[0]


def test_of_two_servers_of_a_pool_the_earlier_end_is_told_from_half_a_year_before() -> None:
    first = NOVEMBER + AHEAD
    ends = (first + timedelta(days=1), first)
    listings = [ListingFacts(200, frozenset({"new"}), ends={"new": end}) for end in ends]
    found = [
        EndpointFacts(f"a/{end}", "a", "https://a", ("new",), False, each)
        for end, each in zip(ends, listings, strict=True)
    ]
    assert [f"ends on {first}, in 180 days" in one.line for one in sunsets(config("new"), found, NOVEMBER)] == [True]


def test_a_model_that_stays_has_no_warning() -> None:
    """Nor one whose end is half a year away."""
    listed = b'{"data": [{"id": "new", "shutdown_date": "2027-09-01"}]}'
    assert told("gpt-6.1-sol") == told("new", listed) == []


@pytest.mark.parametrize("said", ["null", "7", '"soon"', '"2026-13-01"', "{}", '""'])
def test_a_date_that_is_none_is_ignored(said: str) -> None:
    """Whatever a server sends."""
    assert read_ends(b'{"data": [null, 7, {"id": 7}, {"id": "m", "shutdown_date": %s}]}' % said.encode()) == {}
