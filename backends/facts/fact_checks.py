"""Checks of a refreshed fact file: as a whole, before any row of it is used.

- Text: bounded in bytes, nesting and nodes, counted with aliases written out, before a value is made of it.
- Values: short printable texts, finite numbers, yes or no, and days without a time.
- Rows: by the types of the rows (`fact_rows.py`, `model_facts.py`, `listed_price.py`). Callers choose the names that
  patterns are searched in, so a pattern whose search could take long is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from math import log2
from typing import Any

import msgspec
import yaml

from backends.facts.fact_rows import (
    APIS,
    LOADER,
    MODELS,
    ApiRow,
    Document,
    ModelRow,
    PriorRules,
    TierRules,
    apis_of,
    parsed,
    rows_of,
    schema_rules_of,
)
from backends.facts.lookup import GONE
from backends.facts.model_facts import Facts
from backends.facts.priors import UNNAMED

LARGEST = 4 << 20  # bytes of a file
MOST_NODES = 50_000  # of YAML, aliases written out; the shipped models.yaml has 4,000
DEEPEST = 16  # nested collections
LONGEST = 2_000  # characters of a text
LARGEST_NUMBER = 1e9
MOST_REPEATS = 2  # of `*`, `+` and `{n,}` in a pattern: a search takes the length of the name to the third power
_VALUES = (str, int, float, bool, type(None), date)
_WRONG = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError, re.error),
    *(yaml.YAMLError, RecursionError),
)
MOST_WAYS = 16  # of a pattern to match a name, as a power of two, beside those of its repeats
_ATOM = re.compile(r"\\[^1-9]|\[\^?\]?(?:\\.|[^\]\\])*\]")  # an escape or a set, whatever is written in it
_HEAD = re.compile(r"\((?:\?(?:[:=!]|<[=!]|P<\w+>))?")
_REFUSED = re.compile(r"\\|\(\?|\)(?:[*+]|\{)")  # a reference back, other heads of a group, a group that is repeated
_REPEAT = re.compile(r"[*+]|\{\d*,\}")
_BETWEEN = re.compile(r"\{(\d*),(\d+)\}")
_INNERMOST = re.compile(r"\(([^()]*)\)")


class BadFacts(ValueError):
    """An invalid file of facts."""


class OldFacts(BadFacts):
    """A file of facts that is no newer than the file in use, as after an upgrade of the release."""


def checked(text: bytes) -> tuple[str, Document]:
    """Validate a fact file. Returns the name of the shipped file to replace, and the contents. Raises BadFacts."""
    if len(text) > LARGEST:
        raise BadFacts(f"longer than {LARGEST >> 20} MB")
    try:
        _check_size(text)
        document = parsed(text)
        _check_values(document)
        return _checked(document)
    except _WRONG as error:
        raise BadFacts(_one_line(error)) from None


def check_together(models: Document, rows: Document) -> None:
    """The families and subsets of JSON schema that the rows of one file name are in the other. Raises BadFacts."""
    named = {family for row in apis_of(rows).values() for family in row.families or ()}
    if missing := named - models["families"].keys():
        raise BadFacts(f"the family {min(missing)} is missing")
    schemas = {name for family in rows_of(models).values() for row in family for name in _schemas(row.facts)}
    if missing := schemas - rows["schemas"].keys():
        raise BadFacts(f"the schema {min(missing)} is missing")


# ---------------------------------------------------------------- the text and its values


def _check_size(text: bytes) -> None:
    """Raises BadFacts, yaml.YAMLError."""
    nodes, anchors, unclosed = 0, dict[str, int](), list[tuple[str | None, int]]()
    for event in yaml.parse(text, LOADER):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise BadFacts(f"the alias {event.anchor!r} is within its own value, or of none")
            nodes += anchors[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            _check_length(event.value)
            nodes += 1
            if event.anchor is not None:
                anchors[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            unclosed.append((event.anchor, nodes))
            nodes += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = unclosed.pop()
            if anchor is not None:
                anchors[anchor] = nodes - before
        if nodes > MOST_NODES or len(unclosed) > DEEPEST:
            raise BadFacts(f"more than {MOST_NODES} values, or than {DEEPEST} within one another")


def _check_length(text: str) -> None:
    if len(text) > LONGEST:
        raise BadFacts(f"a text has more than {LONGEST} characters: {text[:40]!r}")


def _check_values(value: Any, place: str = "") -> None:
    if isinstance(value, dict):
        for name, each in value.items():
            _check_value(name, place)
            if not isinstance(name, str):
                raise BadFacts(f"{place or 'the file'}: {name!r} is no name; put it in quotes")
            _check_values(each, f"{place}.{name}" if place else name)
    elif isinstance(value, list):
        for each in value:
            _check_values(each, place)
    else:
        _check_value(value, place)


def _check_value(value: Any, place: str) -> None:
    if type(value) not in _VALUES:
        raise BadFacts(f"{place}: {value!r:.80} is no value of a fact; a day is written YYYY-MM-DD")
    if isinstance(value, (int, float)) and not abs(value) <= LARGEST_NUMBER:
        raise BadFacts(f"{place}: {value!r:.80} is no finite number up to {LARGEST_NUMBER:g}")
    if isinstance(value, str) and not value.isprintable():
        raise BadFacts(f"{place}: {value!r:.80} has characters that cannot be shown")


# ---------------------------------------------------------------- rows


def _checked(document: Any) -> tuple[str, Document]:
    if not isinstance(document, dict) or type(document.get("read")) is not date:
        raise BadFacts("no file of facts: it has no day on which it was read (`read: YYYY-MM-DD`)")
    if "families" in document:
        _check_models(document)
        return MODELS, document
    if "apis" in document:
        _check_apis(document)
        return APIS, document
    raise BadFacts("no file of facts: it has neither `families` nor `apis`")


def _check_models(document: Document) -> None:
    for rows in rows_of(document).values():
        for row in rows:
            _check_model(row)
    _check_priors(msgspec.convert(document["priors"], PriorRules))
    tiers = msgspec.convert(document["tiers"], TierRules)
    for name in ("previews", "no_chat", "other_work", "embeddings"):
        check_pattern(f"tiers.{name}", getattr(tiers, name))


def _check_priors(priors: PriorRules) -> None:
    for name in ("shows", "large", "small"):
        check_pattern(f"priors.names.{name}", priors.names[name])
    if "other" not in priors.seconds:
        raise BadFacts("priors.seconds has no row for `other` APIs")
    for api, seconds in priors.hidden.items():
        if UNNAMED not in seconds:
            raise BadFacts(f"priors.hidden.{api} has no seconds for `{UNNAMED}`")


def _check_model(row: ModelRow) -> None:
    check_pattern(row.name, row.match.pattern)
    if row.since and "v" not in row.match.groupindex:
        raise BadFacts(f"{row.name}: `since` needs a version in `match`, written {{v}}")
    said = row.facts.get("shutdown", "")
    ends = said.values() if isinstance(said, Mapping) else (said,)
    if not all(end in ("", GONE) or isinstance(end, date) for end in ends):
        raise BadFacts(f"{row.name}: shutdown is a date, or {GONE}")
    _check_facts(row.name, {name: value for name, value in row.facts.items() if name != "shutdown"})


def _check_apis(document: Document) -> None:
    for name in document.get("schemas", {}):
        schema_rules_of(document, name)
    for row in apis_of(document).values():
        _check_api(document, row)


def _check_api(document: Document, row: ApiRow) -> None:
    _check_facts(row.name, row.facts)
    _check_facts(row.name, row.over)
    for name in _schemas(row.facts) | _schemas(row.over):
        schema_rules_of(document, name)


def _schemas(said: Mapping[str, Any]) -> set[str]:
    return {said[name] for name in ("schema", "strict_schema") if said.get(name)}


def _check_facts(row: str, said: Mapping[str, object]) -> None:
    try:
        facts = msgspec.convert(said, Facts)
    except msgspec.ValidationError as error:
        raise BadFacts(f"{row}: {error}") from None
    if facts.shutdown not in ("", GONE):
        raise BadFacts(f"{row}: shutdown of an API is {GONE}, or empty")
    if facts.temperature is not None and facts.temperature[0] > facts.temperature[1]:
        raise BadFacts(f"{row}: temperature is the least and the most")
    for pattern in (facts.tool_name, facts.call_id):
        check_pattern(row, pattern, repeats=1)  # of texts of any length


def check_pattern(row: str, pattern: str, repeats: int = MOST_REPEATS) -> None:
    """Raises BadFacts where a search could take long, re.error where the pattern is none."""
    re.compile(pattern)
    bare = _HEAD.sub("(", _ATOM.sub("x", pattern))
    if _REFUSED.search(bare) or len(_REPEAT.findall(bare)) > repeats or _ways(bare) > MOST_WAYS:
        raise BadFacts(f"{row}: the search for {pattern!r} could take long; write it without repeated groups")


def _ways(bare: str) -> float:
    """Bound of the ways to match, as a power of two: by what may be absent, by lengths, by alternatives."""
    between = sum(log2(1 + abs(int(most) - int(least or 0))) for least, most in _BETWEEN.findall(bare))
    found, grouped = bare.count("?") + between, 1
    while grouped:
        found += sum(log2(1 + group.count("|")) for group in _INNERMOST.findall(bare))
        bare, grouped = _INNERMOST.subn("x", bare)
    return found + log2(1 + bare.count("|"))


def _one_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"there is no {error}"
    if isinstance(error, (TypeError, AttributeError)) and not isinstance(error, msgspec.MsgspecError):
        return f"a section or a row is written in another form: {error}"[:300]
    said = getattr(error, "problem", None) or str(error)  # of YAML, without an excerpt of the text
    return " ".join(f"{said}".split())[:300] or type(error).__name__
