"""Refreshed files of facts: newer rows than the release has, in a directory, in place of the shipped files.

A file is used if each of its rows is valid for this release, and if its date (`read:`) is later than the shipped
file's. A broken or older file is ignored with a log line, and the shipped file is used.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import yaml

from backends.facts import lookup, priors
from backends.facts.fact_rows import (
    APIS,
    MODELS,
    ApiRow,
    Document,
    ModelRow,
    PriorRules,
    TierRules,
    apis_of,
    in_use,
    parsed,
    put_in_place,
    rows_of,
    schema_rules_of,
    shipped,
)
from backends.facts.model_facts import Facts

FILES = (MODELS, APIS)
PREFIX = "facts-"  # of the files in a state directory
LARGEST = 4 << 20  # bytes of a file
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, re.error, yaml.YAMLError, RecursionError)
log = logging.getLogger("firsttoken")


class BadFacts(ValueError):
    """An invalid file of facts."""


def use(directory: str | Path | None) -> None:
    """Reads the files of a state directory, and all rows once, so that no request waits for them. None: the shipped
    files alone."""
    found = {} if directory is None else {file: _found(path_of(directory, file), file) for file in FILES}
    documents = {file: document for file, document in found.items() if document is not None}
    if put_in_place(_together(documents)):
        for function in (lookup.api_of, lookup._believed, priors.prior_ttft):
            function.cache_clear()
    priors.prior_ttft("compatible", "")


def checked(text: bytes) -> tuple[str, Document]:
    """Validate a fact file. Returns the name of the shipped file to replace, and the contents. Raises BadFacts."""
    if len(text) > LARGEST:
        raise BadFacts(f"longer than {LARGEST >> 20} MB")
    try:
        return _checked(parsed(text))
    except BadFacts:
        raise
    except _WRONG as error:
        raise BadFacts(_one_line(error)) from None


def check_newer(file: str, document: Document) -> None:
    """Raises BadFacts where the file in use is as new."""
    if not _is_newer(document, in_use(file)):
        raise BadFacts(f"read on {document['read']}, not after the {file} in use ({in_use(file)['read']})")


def path_of(directory: str | Path, file: str) -> Path:
    return Path(directory) / f"{PREFIX}{file}"


def all_in_use() -> Mapping[str, Document]:
    return {file: in_use(file) for file in FILES}


def rows(document: Document) -> Iterator[tuple[str, Any]]:
    """Rows as written, each with a unique name."""
    for family, written in document.get("families", {}).items():
        for row in written:
            yield f"{family} {row['match']}" + (f" since {row['since']}" if "since" in row else ""), row
    for section in ("apis", "schemas", "priors", "tiers"):
        yield from ((f"{section} {name}", row) for name, row in document.get(section, {}).items())


def _is_newer(document: Document, than: Document) -> bool:
    return bool(document["read"] > than["read"])


def check_together(documents: Mapping[str, Document]) -> None:
    """The families that APIs name are there, and every API of this release. Raises BadFacts."""
    models, rows = (documents.get(file) or shipped(file) for file in FILES)
    named = {family for row in apis_of(rows).values() for family in row.families or ()}
    if missing := named - models["families"].keys():
        raise BadFacts(f"the family {min(missing)} is missing")
    if missing := shipped(APIS)["apis"].keys() - rows["apis"].keys():
        raise BadFacts(f"the API {min(missing)} is missing")


def _found(path: Path, name: str) -> Document | None:
    """None: there is no file, or none that holds."""
    try:
        file, document = checked(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, BadFacts) as error:
        log.warning("the shipped facts hold: %s: %s", path, error)
        return None
    if file != name:
        log.warning("the shipped facts hold: %s: has the contents of %s", path, file)
        return None
    if not _is_newer(document, shipped(file)):
        log.info("the shipped facts hold: %s was read before them", path)
        return None
    return document


def _together(documents: dict[str, Document]) -> dict[str, Document]:
    try:
        check_together(documents)
    except BadFacts as error:
        log.warning("the shipped facts hold: %s", error)
        return {}
    return documents


def _checked(document: Document) -> tuple[str, Document]:
    if not isinstance(document, dict) or not isinstance(document.get("read"), date):
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
            _check_row(row)
    priors, tiers = msgspec.convert(document["priors"], PriorRules), msgspec.convert(document["tiers"], TierRules)
    named = [priors.names[name] for name in ("shows", "large", "small")]
    for pattern in (*named, tiers.previews, tiers.no_chat, tiers.other_work, tiers.embeddings):
        re.compile(pattern)
    if "other" not in priors.seconds:
        raise BadFacts("priors.seconds has no row for `other` APIs")


def _check_row(row: ModelRow) -> None:
    said = row.facts.get("shutdown", "")
    ends = said.values() if isinstance(said, Mapping) else (said,)
    if not all(end in ("", lookup.GONE) or isinstance(end, date) for end in ends):
        raise BadFacts(f"{row.name}: shutdown is a date, or {lookup.GONE}")
    _check_facts(row.name, {name: value for name, value in row.facts.items() if name != "shutdown"})


def _check_apis(document: Document) -> None:
    for row in apis_of(document).values():
        _check_facts(row.name, {**row.facts, **row.over})
        for name in _schemas(row):
            schema_rules_of(document, name)


def _schemas(row: ApiRow) -> set[str]:
    return {str(row.facts[name]) for name in ("schema", "strict_schema") if name in row.facts}


def _check_facts(row: str, said: Mapping[str, object]) -> None:
    try:
        facts = msgspec.convert(said, Facts)
    except msgspec.ValidationError as error:
        raise BadFacts(f"{row}: {error}") from None
    for pattern in (facts.tool_name, facts.call_id):
        re.compile(pattern)


def _one_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"there is no {error}"
    said = getattr(error, "problem", None) or str(error)  # of YAML, without an excerpt of the text
    return " ".join(f"{said}".split())[:300] or type(error).__name__
