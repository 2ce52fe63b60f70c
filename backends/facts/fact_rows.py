"""Rows of the fact files, read once per process while the configuration loads: the first read takes 20 to 110 ms.

A file is shipped with the release, or a refreshed file installed by `refreshed.use`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import yaml

from backends.facts.listed_price import Prices, prices_of
from backends.facts.model_facts import Facts, SchemaRules, Seconds

_HERE = Path(__file__).parent
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml reads ten times as fast
FACTS = frozenset(field.name for field in fields(Facts))
_RULES = frozenset(field.name for field in fields(SchemaRules))
Text = Annotated[str, msgspec.Meta(min_length=1)]
Version = tuple[int, ...]
Document = Mapping[str, Any]
MODELS, APIS = "models.yaml", "apis.yaml"
LATEST = "latest"  # end of a name that moves on to each newer version
_BEGIN = r"(?<![a-z0-9])"
_PLACE = re.compile(r"(?:-\??)?\{v\}")
_VERSION = r"(?P<v>\d{1,2}(?:[.-]\d{1,2}(?![\db]))?)(?!\d)"  # eight digits behind a name are a date, `8b` a size


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Facts of models of a family. `since`: the least version."""

    family: str
    name: str  # `match` as written, and `since`
    match: re.Pattern[str]
    alias: re.Pattern[str] | None  # of the newest version's alias, which has none in its name: `opus-latest`
    since: Version
    facts: Mapping[str, Any]
    source: str
    note: str
    prices: Prices

    def holds(self, name: str) -> bool:
        """True if the row matches a model name. `name`: normalized by `lookup.plain`."""
        found = self.match.search(name)
        if found is None:
            return self.alias is not None and name.endswith(LATEST) and self.alias.search(name) is not None
        return not self.since or (found["v"] is not None and version(found["v"]) >= self.since)


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
    seconds: Mapping[str, tuple[Seconds, Seconds]]
    hidden: Mapping[str, Mapping[str, Seconds]]
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TierRules:
    """Choice of models by `up`: the section `tiers` of models.yaml, where each is explained. Texts are patterns."""

    order: tuple[str, ...]
    best: tuple[float, float]
    fast: tuple[float, float]
    leaving: Annotated[int, msgspec.Meta(ge=0, le=3650)]
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
        rows[name] = _api_row(name, written, rows)
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


def schema_names() -> Sequence[str]:
    return sorted(in_use(APIS)["schemas"])


def schema_rules_of(document: Document, name: str) -> SchemaRules:
    rules = document["schemas"][name] if name else {}
    _refuse_unknown(name, rules.keys(), _RULES)
    return msgspec.convert(rules, SchemaRules)


def parsed(text: bytes) -> Any:
    """YAML, as libyaml reads it. Raises yaml.YAMLError."""
    return yaml.load(text, LOADER)


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


class _WrittenModel(msgspec.Struct, frozen=True):
    """A row of models.yaml, beside its facts."""

    match: Text
    source: Text
    since: float | str | None = None
    note: str = ""
    prices: dict[str, Any] = {}


class _WrittenApi(msgspec.Struct, frozen=True):
    """A row of apis.yaml, beside its facts. `like` names a row before, whose facts hold where this row has none."""

    like: Text | None = None
    hosts: tuple[Text, ...] = ()
    families: tuple[Text, ...] | None = None
    over: dict[str, Any] = {}


def _model_row(family: str, written: Mapping[str, Any]) -> ModelRow:
    head, said = _split(family, written, _WrittenModel)
    name = f"{family} {head.match}" + ("" if head.since is None else f" since {written['since']}")
    return ModelRow(
        family,
        name,
        re.compile(_BEGIN + head.match.replace("{v}", _VERSION)),
        _alias(head.match),
        () if head.since is None else version(str(written["since"])),
        said,
        head.source,
        head.note,
        prices_of(name, head.prices),
    )


def _api_row(name: str, written: Mapping[str, Any], before: Mapping[str, ApiRow]) -> ApiRow:
    head, said = _split(name, written, _WrittenApi)
    _refuse_unknown(name, head.over.keys())
    like = None if head.like is None else before[head.like]
    families = like.families if head.families is None and like is not None else head.families
    return ApiRow(name, head.hosts, families, {**(like.facts if like is not None else {}), **said}, head.over)


def _alias(match: str) -> re.Pattern[str] | None:
    """Of a name with `latest` in place of a version at its end, or without the version in its middle."""
    if not (placed := _PLACE.search(match)):
        return None
    return re.compile(_BEGIN + match[: placed.start()] + (match[placed.end() :] or f"-{LATEST}$"))


Head = TypeVar("Head", bound=msgspec.Struct)


def _split(row: str, written: Mapping[str, Any], kind: type[Head]) -> tuple[Head, Mapping[str, Any]]:
    """The members of a row beside its facts, and the facts."""
    said = {name: value for name, value in written.items() if name in FACTS}
    _refuse_unknown(row, written.keys() - FACTS - set(kind.__struct_fields__))
    try:
        return msgspec.convert({name: written[name] for name in written.keys() - FACTS}, kind), said
    except msgspec.ValidationError as error:
        raise ValueError(f"{row}: {error}") from None


def _refuse_unknown(row: str, names: Set[str], known: Set[str] = FACTS) -> None:
    if unknown := names - known:
        raise ValueError(f"the row of {row} has a fact that does not exist: {min(unknown)}")
