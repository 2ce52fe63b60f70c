"""Newer files of facts in place of the shipped ones: which hold, which are refused, and that no request waits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from backends.facts import fact_rows, lookup, priors, refreshed
from backends.facts.fact_rows import APIS, MODELS, shipped
from backends.facts.lookup import facts_of
from backends.facts.priors import prior_ttft
from backends.facts.refreshed import BadFacts, checked, use

NEW_ROW = {"match": "gpt-{v}-vega", "since": 7, "size": 85, "efforts": ["low"], "ttft": {"low": 7.5}, "source": "S"}


@pytest.fixture(autouse=True)
def shipped_rows() -> Iterator[None]:
    """Tables are of the process: each test leaves the shipped ones."""
    yield
    use(None)


def newer(file: str = MODELS, days: int = 1, **changes: Any) -> bytes:
    """The shipped file as a later day has it, with one row more."""
    document = {**shipped(file), "read": shipped(file)["read"] + timedelta(days)}
    if file == MODELS:
        families = document["families"]
        document["families"] = {**families, "openai": [NEW_ROW, *families["openai"]]}
    return yaml.safe_dump({**document, **changes}, sort_keys=False).encode()


def kept(folder: Path, text: bytes, file: str = MODELS) -> None:
    refreshed.path_of(folder, file).write_bytes(text)


def test_newer_rows_hold_in_place_of_shipped_ones(tmp_path: Path) -> None:
    """Facts, priors and the names of the rows, whatever was looked up before; without the directory the shipped rows
    hold again."""
    before = facts_of("openai", "gpt-7-vega").efforts, prior_ttft("openai", "gpt-7-vega")
    kept(tmp_path, newer())
    use(tmp_path)
    assert facts_of("openai", "gpt-7-vega").efforts == ("low",) != before[0]
    assert prior_ttft("openai", "gpt-7-vega")["low"] == 7.5
    use(None)
    assert (facts_of("openai", "gpt-7-vega").efforts, prior_ttft("openai", "gpt-7-vega")) == before


@pytest.mark.parametrize("days", [0, -30])
def test_a_file_that_is_not_newer_than_the_release_is_left(tmp_path: Path, days: int) -> None:
    """As after an upgrade."""
    kept(tmp_path, newer(days=days))
    use(tmp_path)
    assert not fact_rows.is_refreshed(MODELS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "the shipped facts hold"),
        (b"[]", "no file of facts"),
        (b"\xff\xfe\x00", "the shipped facts hold"),
        (newer()[:5000], "the shipped facts hold"),
        (newer(families={"openai": [{"match": "m", "source": "S", "efort": []}]}), "does not exist: efort"),
        (newer(families={}), "is missing"),
        (newer(APIS), "has the contents of apis.yaml"),
    ],
)
def test_a_broken_file_leaves_the_shipped_one(
    tmp_path: Path, text: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line of the log; requests go on."""
    kept(tmp_path, text)
    with caplog.at_level(logging.WARNING, "firsttoken"):
        use(tmp_path)
    assert words in caplog.text
    assert not fact_rows.is_refreshed(MODELS)
    assert facts_of("openai", "gpt-6.1-sol").size == 80


BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"efforts": "low"}, "gpt-x: Expected `array "),
    ({"size": "large"}, "gpt-x: Expected `float"),
    ({"shutdown": "soon"}, "shutdown is a date, or gone"),
    ({"tool_name": "["}, "unterminated character set"),
    ({"match": "("}, "missing \\)"),
    ({"source": None, "sampling": "often"}, "Invalid enum value 'often'"),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
def test_every_row_is_checked(row: dict[str, Any], words: str) -> None:
    """One bad row refuses the file."""
    families = {**shipped(MODELS)["families"], "new": [{"match": "gpt-x", "source": "S", **row}]}
    with pytest.raises(BadFacts, match=words):
        checked(newer(families=families))


def test_an_api_of_the_release_is_not_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    apis = {name: row for name, row in shipped(APIS)["apis"].items() if name != "xai"}
    (tmp_path / f"{refreshed.PREFIX}{APIS}").write_bytes(newer(APIS, apis=apis))
    with caplog.at_level(logging.WARNING, "firsttoken"):
        use(tmp_path)
    assert "the API xai is missing" in caplog.text
    assert not fact_rows.is_refreshed(APIS)


def test_both_shipped_files_are_valid() -> None:
    """By the check of refreshed ones."""
    assert [checked(newer(file))[0] for file in (MODELS, APIS)] == [MODELS, APIS]
    with pytest.raises(BadFacts, match="longer than 4 MB"):
        checked(b" " * (refreshed.LARGEST + 1))


def test_after_the_start_no_lookup_reads_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even of a model that nobody has named before: reading takes up to 110 ms, which no request may wait."""
    use(None)

    def refuse(text: bytes) -> None:
        raise AssertionError("read while serving")

    monkeypatch.setattr(fact_rows, "parsed", refuse)
    fact_rows.families.cache_clear()
    assert facts_of("openai", "gpt-6.1-sol-never-seen").schema == "openai"
    assert lookup.api_of("compatible", "api.groq.com") == "groq"
    assert fact_rows.schema_rules("openai").root_object


def test_every_table_made_of_rows_is_made_anew(tmp_path: Path) -> None:
    """A function that caches what it read of rows must not outlive them."""
    cached = {
        name: function
        for module in (fact_rows, lookup, priors)
        for name, function in vars(module).items()
        if hasattr(function, "cache_clear") and function is not fact_rows.shipped
    }
    facts_of("openai", "gpt-6-luna"), lookup.api_of("openai"), prior_ttft("openai", "gpt-6-luna")
    fact_rows.schema_rules("openai"), fact_rows.tier_rules()
    kept(tmp_path, newer())
    use(tmp_path)
    left = {name: function.cache_info().currsize for name, function in cached.items()}
    assert max(left["_believed"], left["prior_ttft"]) <= 1  # of the read at the start
    assert {left[name] for name in ("schema_rules", "tier_rules")} == {0}
    assert cached.keys() >= {"families", "apis", "prior_rules", "tier_rules", "schema_rules", "api_of"}
