"""Rows of the fact files, read once per process while the configuration loads: the first read takes 20 to 110 ms.

A file is shipped with the release, or a refreshed file installed by `refreshed.use`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from backends.facts.listed_price import Prices, prices_of
from backends.facts.model_facts import Facts, SchemaRules

_HERE = Path(__file__).parent
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml reads ten times as fast
FACTS = frozenset(field.name for field in fields(Facts))
_RULES = frozenset(field.name for field in fields(SchemaRules))
Version = tuple[int, ...]
Document = Mapping[str, Any]
MODELS, APIS = "models.yaml", "apis.yaml"
_VERSION = r"(?P<v>\d{1,2}(?:[.-]\d{1,2}(?![\db]))?)(?!\d)"  # eight digits behind a name are a date, `8b` a size


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Facts of models of a family. `since`: the least version."""

    family: str
    name: str  # `match` as written, and `since`
    match: re.Pattern[str]
    since: Version
    facts: Mapping[str, Any]
    source: str
    note: str
    prices: Prices

    def holds(self, name: str) -> bool:
        """True if the row matches a model name. `name`: normalized by `lookup.plain`."""
        found = self.match.search(name)
        return found is not None and (not self.since or version(found["v"]) >= self.since)


@dataclass(frozen=True, slots=True)
class ApiRow:
    """Facts of an API, whatever the model. `over`: whatever the model's row says."""

    name: str
    hosts: tuple[str, ...]
    families: tuple[str, ...] | None  # families to search; None: all
    facts: Mapping[str, Any]
    over: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PriorRules:
    """First tokens of models whose row has no `ttft`: the section `priors` of models.yaml, where each is explained."""

    large_from: float
    seconds: Mapping[str, tuple[float, float]]
    hidden: Mapping[str, Mapping[str, float]]
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TierRules:
    """Choice of models by `up`: the section `tiers` of models.yaml, where each is explained. Texts are patterns."""

    order: tuple[str, ...]
    best: tuple[float, float]
    fast: tuple[float, float]
    leaving: int
    previews: str
    no_chat: str
    other_work: str
    embeddings: str


def version(text: str) -> Version:
    return tuple(int(part) for part in re.split("[.-]", text))


@cache
def families() -> Mapping[str, Sequence[ModelRow]]:
    """Rows by family, in the order of the file."""
    return rows_of(in_use(MODELS))


def rows_of(document: Document) -> Mapping[str, Sequence[ModelRow]]:
    """Raises ValueError, KeyError or TypeError where a row is none."""
    return {name: [_model_row(name, row) for row in rows] for name, rows in document["families"].items()}


@cache
def apis() -> Mapping[str, ApiRow]:
    """Rows by name."""
    return apis_of(in_use(APIS))


def apis_of(document: Document) -> Mapping[str, ApiRow]:
    """Raises ValueError, KeyError or TypeError where a row is none."""
    rows: dict[str, ApiRow] = {}
    for name, written in document["apis"].items():
        rows[name] = _api_row(name, dict(written), rows)
    return rows


@cache
def prior_rules() -> PriorRules:
    return msgspec.convert(in_use(MODELS)["priors"], PriorRules)


@cache
def tier_rules() -> TierRules:
    return msgspec.convert(in_use(MODELS)["tiers"], TierRules)


@cache
def schema_rules(name: str) -> SchemaRules:
    """The subset of JSON schema of `Facts.schema` and `Facts.strict_schema`."""
    return schema_rules_of(in_use(APIS), name)


def schema_rules_of(document: Document, name: str) -> SchemaRules:
    rules = document["schemas"][name] if name else {}
    _refuse_unknown(name, rules.keys(), _RULES)
    return msgspec.convert(rules, SchemaRules)


def parsed(text: bytes) -> Any:
    """YAML, as libyaml reads it. Raises yaml.YAMLError."""
    return yaml.load(text, _LOADER)


@cache
def shipped(file: str) -> Document:
    """The file of this release."""
    read: Document = parsed((_HERE / file).read_bytes())
    return read


def read_on(file: str) -> str:
    """The day on which the knowledge of a file in use was read."""
    return str(in_use(file)["read"])


def is_refreshed(file: str) -> bool:
    return file in _in_place


def put_in_place(documents: Mapping[str, Document]) -> bool:
    """Use refreshed files, by name, in place of shipped files. Files not named stay shipped. True: rows changed."""
    global _edition
    if _in_place == documents:
        return False
    _edition += 1
    _in_place.clear()
    _in_place.update(documents)
    for function in (families, apis, prior_rules, tier_rules, schema_rules):
        function.cache_clear()
    return True


_in_place: dict[str, Document] = {}
_edition = 0


def edition() -> int:
    """Version number of the rows, increased by each change: values derived under another number are stale."""
    return _edition


def in_use(file: str) -> Document:
    return _in_place.get(file) or shipped(file)


def _model_row(family: str, written: Mapping[str, Any]) -> ModelRow:
    said = {name: value for name, value in written.items() if name in FACTS}
    _refuse_unknown(family, written.keys() - FACTS - {"match", "since", "source", "note", "prices"})
    name = f"{family} {written['match']}" + (f" since {written['since']}" if "since" in written else "")
    return ModelRow(
        family,
        name,
        re.compile(r"(?<![a-z0-9])" + written["match"].replace("{v}", _VERSION)),
        version(str(written["since"])) if "since" in written else (),
        said,
        str(written["source"]),
        written.get("note", ""),
        prices_of(name, written.get("prices", {})),
    )


def _api_row(name: str, written: dict[str, Any], before: Mapping[str, ApiRow]) -> ApiRow:
    """`like` names a row before, whose facts hold where this row has none."""
    like = before[written.pop("like")] if "like" in written else None
    hosts, names, over = written.pop("hosts", ()), written.pop("families", None), written.pop("over", {})
    _refuse_unknown(name, written.keys() | over.keys())
    if names is None and like is not None:
        names = like.families
    inherited = like.facts if like is not None else {}
    return ApiRow(name, tuple(hosts), None if names is None else tuple(names), {**inherited, **written}, over)


def _refuse_unknown(row: str, names: Set[str], known: Set[str] = FACTS) -> None:
    if unknown := names - known:
        raise ValueError(f"the row of {row} has a fact that does not exist: {min(unknown)}")
