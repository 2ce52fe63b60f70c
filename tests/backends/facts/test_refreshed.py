"""Newer files of facts in place of the shipped ones: which hold, which are refused, and that no request waits."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import yaml

from backends.facts import fact_rows, lookup, priors, refreshed
from backends.facts.fact_checks import OldFacts
from backends.facts.fact_rows import APIS, MODELS, shipped
from backends.facts.lookup import facts_of
from backends.facts.priors import prior_ttft
from backends.facts.refreshed import use

NEW_ROW = {"match": "gpt-{v}-vega", "since": 7, "size": 85, "efforts": ["low"], "ttft": {"low": 7.5}, "source": "S"}


@pytest.fixture(autouse=True)
def shipped_rows() -> Iterator[None]:
    """Tables are of the process: each test leaves the shipped ones."""
    yield
    use({})


def newer(file: str = MODELS, days: int = 1, **changes: Any) -> bytes:
    """The shipped file as a later day has it, with one row more."""
    document = {**shipped(file), "read": shipped(file)["read"] + timedelta(days)}
    if file == MODELS:
        families = document["families"]
        document["families"] = {**families, "openai": [NEW_ROW, *families["openai"]]}
    return yaml.safe_dump({**document, **changes}, sort_keys=False).encode()


def reason(text: bytes, file: str = MODELS) -> str:
    """Why the file is left; the shipped rows are in use then."""
    found = str(use({file: text})[file])
    assert not fact_rows.is_refreshed(file)
    assert facts_of("openai", "gpt-6.1-sol").size == 80
    return found


def test_newer_rows_hold_in_place_of_shipped_ones() -> None:
    """Facts, priors and the names of the rows, whatever was looked up before; without the file the shipped rows hold
    again."""
    before = facts_of("openai", "gpt-7-vega").efforts, prior_ttft("openai", "gpt-7-vega")
    assert use({MODELS: newer()}) == {}
    assert facts_of("openai", "gpt-7-vega").efforts == ("low",) != before[0]
    assert prior_ttft("openai", "gpt-7-vega")["low"] == 7.5
    use({})
    assert (facts_of("openai", "gpt-7-vega").efforts, prior_ttft("openai", "gpt-7-vega")) == before


@pytest.mark.parametrize("days", [0, -30])
def test_a_file_that_is_not_newer_than_the_release_is_left(days: int) -> None:
    """As after an upgrade."""
    assert "not after the models.yaml of the release" in reason(newer(days=days))
    assert isinstance(use({MODELS: newer(days=days)})[MODELS], OldFacts)


def test_a_file_of_a_day_to_come_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would shadow all files after it. Tomorrow has begun elsewhere, and the clock may be behind the release."""
    read = shipped(MODELS)["read"]
    monkeypatch.setattr(refreshed, "_today", lambda: read + timedelta(30))
    assert use({MODELS: newer(days=31)}) == {}
    assert "a day to come" in reason(newer(days=32))
    monkeypatch.setattr(refreshed, "_today", lambda: read - timedelta(3000))
    assert use({MODELS: newer(days=1)}) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "did not find expected node content"),
        (b"[]", "no file of facts"),
        (b"\xff\xfe\x00", ""),
        (newer()[:5000], ""),
        (newer(families={"openai": [{"match": "m", "source": "S", "efort": []}]}), "does not exist: efort"),
        (newer(families={}), "is missing"),
        (newer(APIS), "has the contents of apis.yaml"),
    ],
)
def test_a_broken_file_leaves_the_shipped_one(text: bytes, words: str) -> None:
    """With a reason of one line; requests go on."""
    found = reason(text)
    assert words in found
    assert found
    assert "\n" not in found


def test_no_name_of_the_release_is_lost() -> None:
    """Of an API or of a subset of JSON schema: a configuration, or a lesson, may have it."""
    apis = {name: row for name, row in shipped(APIS)["apis"].items() if name != "xai"}
    assert "the API xai is missing" in reason(newer(APIS, apis=apis), APIS)
    schemas = {name: row for name, row in shipped(APIS)["schemas"].items() if name != "moonshot"}
    apis = {name: row for name, row in shipped(APIS)["apis"].items() if name != "moonshot"}
    apis["moonshot"] = {"custom_tools": False}
    assert "the schema moonshot is missing" in reason(newer(APIS, apis=apis, schemas=schemas), APIS)


def test_a_row_names_what_the_other_file_has() -> None:
    rows = [{"match": "gpt-{v}-x", "source": "S", "schema": "nowhere"}]
    assert "the schema nowhere is missing" in reason(newer(families={**shipped(MODELS)["families"], "new": rows}))


def test_after_the_start_no_lookup_reads_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even of a model that nobody has named before: reading takes up to 110 ms, which no request may wait."""
    use({})

    def refuse(text: bytes) -> None:
        raise AssertionError("read while serving")

    monkeypatch.setattr(fact_rows, "parsed", refuse)
    fact_rows.families.cache_clear()
    assert facts_of("openai", "gpt-6.1-sol-never-seen").schema == "openai"
    assert lookup.api_of("compatible", "api.groq.com") == "groq"
    assert fact_rows.schema_rules("openai").root_object


def test_every_table_made_of_rows_is_made_anew() -> None:
    """A function that caches what it read of rows must not outlive them."""
    cached = {
        name: function
        for module in (fact_rows, lookup, priors)
        for name, function in vars(module).items()
        if hasattr(function, "cache_clear") and function is not fact_rows.shipped
    }
    facts_of("openai", "gpt-6-luna"), lookup.api_of("openai"), prior_ttft("openai", "gpt-6-luna")
    fact_rows.schema_rules("openai"), fact_rows.tier_rules()
    use({MODELS: newer()})
    left = {name: function.cache_info().currsize for name, function in cached.items()}
    assert max(left["_believed"], left["prior_ttft"]) <= 1  # of the read at the start
    assert {left[name] for name in ("schema_rules", "tier_rules")} == {0}
    assert cached.keys() >= {"families", "apis", "prior_rules", "tier_rules", "schema_rules", "api_of"}
