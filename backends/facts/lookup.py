"""Facts of a model at an API, put together of the rows of the API and of the model's family, and of a pool's `accepts`.

The API's row holds first, the family's over it, the API's `over` above both, the pool's `accepts` above all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, lru_cache
from math import inf
from typing import Any

import msgspec

from backends.facts.fact_rows import (
    FACTS,
    LATEST,
    MODELS,
    ApiRow,
    ModelRow,
    apis,
    families,
    rows_of,
    schema_names,
    schema_rules,
    shipped,
    version,
)
from backends.facts.listed_price import ListedPrice
from backends.facts.model_facts import Facts, Sampling

__all__ = [
    "Origin",
    "api_of",
    "facts_of",
    "is_known",
    "is_own",
    "listed_prices",
    "maker_at",
    "model_row",
    "origins",
    "plain",
    "schema_rules",
    "version_of",
    "with_overrides",
]

_PATH = re.compile(r".*/")  # vendors and resources: openai/, publishers/google/models/, accounts/fireworks/models/
_REGION = re.compile(r"(?:(?:us|eu|ap|apac|au|ca|jp|sa|me|af|global|us-gov)\.)?[a-z0-9]+\.(?=[a-z])")  # of Bedrock
_SUFFIX = re.compile(r"(?:@.*|:.*)$")  # a version of Vertex or Bedrock, a variant of OpenRouter, a tag of Ollama
_TUNED = re.compile(r"^ft:")
_POINT = re.compile(r"(?<=\d)p(?=\d)")  # Fireworks writes 5p3
_NUMBER = re.compile(r"(?<![\d.])\d{1,2}(?:[.-]\d{1,2}(?!\d))?(?![\db])")  # neither a date nor a count of parameters
_MOVING = re.compile(rf"-{LATEST}$")
_DATED = re.compile(r"-20\d\d-?[01]\d-?[0-3]\d$")
_NOTHING_KNOWN = Facts()
LONGEST_NAME = 256  # characters
GONE = "gone"  # in place of a day, of a model that has ended
LIKE = "like"  # override with the name of the model whose row holds, as a deployment's name tells none


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of a fact: `api`, `family` or `pool`, with the row's name and its mark."""

    of: str
    row: str
    source: str = ""


def plain(model: str) -> str:
    """A model's name as rows are written: lower case, without vendor, region, path, version of a host or variant."""
    name = _TUNED.sub("", model.lower())
    name = _SUFFIX.sub("", _PATH.sub("", name))
    return _POINT.sub(".", _REGION.sub("", name, count=1) if _REGION.match(name) else name)


@cache
def api_of(kind: str, host: str = "") -> str:
    """Name of the API's row. `host`: of the URL, by which a `compatible` server is known, and a resource at a cloud."""
    host = host.lower()
    for row in apis().values():
        if any(host == known or host.endswith(("." + known, "-" + known)) for known in row.hosts):
            return row.name
    return kind if kind in apis() else "compatible"


def model_row(api: str, model: str) -> ModelRow | None:
    """The first row that holds, of the families of the API. A very long name has none: patterns are searched in it."""
    name = plain(model) if len(model) <= LONGEST_NAME else ""
    return next((row for row in _rows(api, families()) if row.holds(name)), None) if name else None


def is_known(api: str, model: str) -> bool:
    """True where a row holds, of those in use or of the release: a configuration that was valid stays so."""
    if model_row(api, model) is not None:
        return True
    return any(row.holds(plain(model)) for row in _rows(api, rows_of(shipped(MODELS))))


def is_own(api: str, model: str) -> bool:
    """True where a row of the API's own family holds: an API that resells has none."""
    row = model_row(api, model)
    return row is not None and row.family == api


def maker_at(host: str) -> str | None:
    """The API at exactly this host. Regional hosts and cloud resources do not match: their prices differ."""
    return next((row.name for row in apis().values() if host.lower() in row.hosts), None)


def listed_prices(api: str, model: str) -> Sequence[ListedPrice]:
    """Prices of a model by its name at its maker's API; empty: unknown."""
    row = model_row(api, model)
    if row is None or row.family != api:
        return ()
    name = _PATH.sub("", model.lower())
    return row.prices.get(name) or row.prices.get(_priced_alias(name, row.prices), ())


def _priced_alias(name: str, listed: Collection[str]) -> str:
    """The listed name that a `-latest` or dated name stands for. Empty: none, or other dates of it have own prices."""
    base = _MOVING.sub("", name)
    if base != name:
        return base
    base = _DATED.sub("", name)
    return "" if base == name or any(_DATED.sub("", other) == base != other for other in listed) else base


def version_of(model: str) -> tuple[float, ...]:
    """Numbers of the first version in a name; of an alias without one, `latest`, higher than all."""
    name = plain(model)
    found = _NUMBER.search(name)
    if found is not None:
        return version(found[0])
    return (inf,) if name.endswith(LATEST) else ()


@lru_cache(maxsize=4096)
def _believed(api: str, model: str) -> Facts:
    row, found = _api(api), model_row(api, model)
    said = _joined(_joined(row.facts, _of_model(found, model)), row.over)
    return msgspec.convert(said, Facts)


def facts_of(kind: str, model: str, overrides: Mapping[str, Any] | None = None) -> Facts:
    """`kind`: of the backend, or a row of apis.yaml (`api_of`). `overrides`: a pool's `accepts`, validated."""
    if not overrides:
        return _believed(kind, model)
    return with_overrides(_believed(kind, str(overrides.get(LIKE, model))), overrides)


def with_overrides(facts: Facts, overrides: Mapping[str, Any]) -> Facts:
    """Facts where names of members are yes or no, and names of facts have their value. Raises ValueError."""
    changes: dict[str, Any] = {}
    refused = set(facts.refused)
    for name, value in overrides.items():
        if name == LIKE:
            _check_like(value)
        elif is_fact(name, value):
            changes[name] = _value(name, value)
        elif not isinstance(value, bool):
            raise ValueError(f"accepts.{name}: write yes or no")
        else:
            (refused.discard if value else refused.add)(name)
            if value and facts.members is not None and "." not in name:
                changes["members"] = changes.get("members", facts.members) | {name}
            if value and name in facts.sampling_members and facts.sampling is not Sampling.FREE:
                changes["sampling"] = Sampling.FREE
    return replace(facts, **{"refused": frozenset(refused), **changes})


def is_fact(name: str, value: Any) -> bool:
    """True for an override of a fact, false for one of a member: some facts have the name of the member they limit."""
    return name in FACTS and (not isinstance(value, bool) or isinstance(getattr(_NOTHING_KNOWN, name), bool))


def origins(kind: str, model: str, overrides: Mapping[str, Any] | None = None) -> Mapping[str, Origin]:
    """By name of a fact, or of a member in `overrides`. Facts that no row has are left out."""
    overrides = overrides or {}
    row, found = _api(kind), model_row(kind, overrides.get(LIKE, model))
    known = {name: Origin("api", row.name) for name in row.facts}
    if found is not None:
        known |= {name: Origin("family", found.name, found.source) for name in found.facts}
    known |= {name: Origin("api", row.name) for name in row.over}
    return known | {name: Origin("pool", "accepts") for name in overrides}


def _api(name: str) -> ApiRow:
    return apis().get(name) or apis()["compatible"]


def _rows(api: str, known: Mapping[str, Sequence[ModelRow]]) -> Iterator[ModelRow]:
    row = _api(api)
    if row.families is None:  # the API's own family first
        yield from known.get(row.name, ())
        for name, rows in known.items():
            if name not in (row.name, "open", *_HOSTED):
                yield from rows
        return
    for name in row.families:
        yield from known[name]


_HOSTED = ("groq", "cerebras")  # families of an API that holds others' models


def _of_model(row: ModelRow | None, model: str) -> Mapping[str, Any]:
    if row is None:
        return {}
    said = row.facts.get("shutdown")
    return row.facts if said is None else {**row.facts, "shutdown": _shutdown(said, plain(model))}


def _shutdown(said: Any, name: str) -> str:
    """Of a name with or without its date, where the row has several."""
    if not isinstance(said, Mapping):
        return said.isoformat() if isinstance(said, date) else str(said)
    dashed = name.replace(".", "-")
    for known, end in said.items():
        if re.fullmatch(re.escape(known.replace(".", "-")) + r"(-20\d\d.*)?", dashed):
            return _shutdown(end, name)
    return ""


def _joined(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Sets and mappings of members add up; any other fact above replaces the one below."""
    joined = {**below, **above}
    if "refused" in below and "refused" in above:
        joined["refused"] = [*below["refused"], *above["refused"]]
    for name in ("renamed", "speeds"):
        if name in below and name in above:
            joined[name] = {**below[name], **above[name]}
    return joined


def _check_like(value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"accepts.{LIKE}: write the name of a model")


def _value(name: str, value: Any) -> Any:
    if isinstance(getattr(_NOTHING_KNOWN, name), bool) and not isinstance(value, bool):
        raise ValueError(f"accepts.{name}: write yes or no")
    try:
        found = getattr(msgspec.convert({name: value}, Facts), name)
    except msgspec.ValidationError as error:
        raise ValueError(f"accepts.{name}: {str(error).partition(' - at')[0]}") from None
    if name in ("tool_name", "call_id"):
        _check_pattern(name, found)
    if name in ("schema", "strict_schema") and found not in {"", *schema_names()}:
        raise ValueError(f"accepts.{name}: write one of {', '.join(schema_names())}")
    return found


def _check_pattern(name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"accepts.{name}: no regular expression: {error}") from None
