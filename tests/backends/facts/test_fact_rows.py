"""The shipped rows: each is read, can be reached, and has a source."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import msgspec
import pytest

from backends.catalog import KINDS
from backends.facts import fact_rows
from backends.facts.fact_rows import ApiRow, ModelRow, apis, families, version
from backends.facts.lookup import schema_rules
from backends.facts.model_facts import Facts, SchemaRules

ROWS = [row for rows in families().values() for row in rows]
SCHEMAS = sorted(
    {str(row.facts[name]) for row in apis().values() for name in ("schema", "strict_schema") if name in row.facts}
)


def said_ends(row: ModelRow) -> list[object]:
    said = row.facts.get("shutdown", "")
    return list(said.values()) if isinstance(said, dict) else [said]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_of_a_model_is_valid(row: ModelRow) -> None:
    """Its facts have their types, its source has a mark: S the provider's pages, R reports of users, G guess."""
    stated = {name: value for name, value in row.facts.items() if name != "shutdown"}
    facts = msgspec.convert(stated, Facts)
    assert set(row.source[0]) <= set("SRG")
    assert facts.default_effort in ("", *(facts.efforts or ()))
    assert set(facts.off_with_efforts or ()) <= set(facts.efforts or ())
    assert all(end in ("", "gone") or isinstance(end, date) for end in said_ends(row))


@pytest.mark.parametrize("row", apis().values(), ids=apis())
def test_a_row_of_an_api_is_valid(row: ApiRow) -> None:
    """Its facts have their types, and the families that it names are there."""
    assert msgspec.convert({**row.facts, **row.over}, Facts) is not None
    assert set(row.families or ()) <= families().keys()
    assert all(host == host.lower() for host in row.hosts)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_subset_of_json_schema_is_valid(name: str) -> None:
    """Each that an API names is there, has rules that exist, and restricts something."""
    assert schema_rules(name) != SchemaRules()
    assert schema_rules("") == SchemaRules()


def test_no_host_is_of_two_apis() -> None:
    hosts = [host for row in apis().values() for host in row.hosts]
    assert len(hosts) == len(set(hosts)) > 20


def test_every_kind_of_backend_has_a_row() -> None:
    """By its name; a kind is added together with its row."""
    assert KINDS.keys() - apis().keys() == set()


@pytest.mark.parametrize("family", families())
def test_newer_rows_of_a_line_stand_first(family: str) -> None:
    """As the first row that holds wins, an older one above would hide the newer."""
    least: dict[str, fact_rows.Version] = {}
    for row in families()[family]:
        if row.since:
            assert row.since <= least.get(row.match.pattern, row.since), row.name
            least[row.match.pattern] = row.since


@pytest.mark.parametrize("rows", families().values(), ids=families())
def test_no_row_is_written_twice(rows: list[ModelRow]) -> None:
    """The second could never hold."""
    assert len({row.name for row in rows}) == len(rows)


@pytest.mark.parametrize("file", ["models.yaml", "apis.yaml"])
def test_a_file_states_the_day_on_which_it_was_read(file: str) -> None:
    """A reader can tell how old the knowledge is."""
    text = Path(fact_rows.__file__).with_name(file).read_text("utf-8")
    assert re.search(r"^read: 20\d\d-\d\d-\d\d$", text, re.MULTILINE)


def test_a_fact_that_does_not_exist_is_refused() -> None:
    """A misspelled fact would otherwise be believed nowhere."""
    with pytest.raises(ValueError, match=r"the row of openai has a fact that does not exist: effort$"):
        fact_rows._model_row("openai", {"match": "m", "source": "S", "effort": ["low"]})
    with pytest.raises(ValueError, match=r"the row of new has a fact that does not exist: stop$"):
        fact_rows._api_row("new", {"over": {"stop": 4}}, {})


def test_where_nothing_is_known_nothing_is_refused() -> None:
    """No member is left out or renamed, no model has an end."""
    unknown = Facts()
    assert (unknown.refused, dict(unknown.renamed), unknown.shutdown) == (frozenset(), {}, "")


def test_versions_are_compared_as_numbers() -> None:
    """Written with a point or a dash: 5.10 is newer than 5.9, and 5 older than 5.1."""
    assert version("5-10") > version("5.9") > version("5.1") > version("5")
