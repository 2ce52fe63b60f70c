"""Refreshed files of facts: newer rows than the release has, in place of the shipped files.

A file is used if each of its rows is valid for this release (`fact_checks.py`), and if its date (`read:`) is later than
the shipped file's and no later than tomorrow. Any other file is left whole, and the shipped file is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from backends.facts import lookup, priors
from backends.facts.fact_checks import BadFacts, OldFacts, check_together, checked
from backends.facts.fact_rows import APIS, MODELS, Document, in_use, put_in_place, shipped

FILES = (MODELS, APIS)
PREFIX = "facts-"  # of the files in a state directory
ABROAD = timedelta(1)  # days begin at other times elsewhere


def use(texts: Mapping[str, bytes]) -> dict[str, BadFacts]:
    """Put refreshed files, by the names of the shipped ones, in place of these, and read all rows once, so that no
    request waits for them. Returns the reason of each file that is left."""
    documents, reasons = dict[str, Document](), dict[str, BadFacts]()
    for file, text in texts.items():
        try:
            documents[file] = _usable(file, text)
        except BadFacts as error:
            reasons[file] = error
    try:
        _check_together(documents)
    except BadFacts as error:
        reasons |= dict.fromkeys(documents, error)
        documents = {}
    if put_in_place(documents):
        for function in (lookup.api_of, lookup._believed, priors.prior_ttft):
            function.cache_clear()
    priors.prior_ttft("compatible", "")
    return reasons


def checked_newer(text: bytes) -> tuple[str, Document]:
    """Validate a file that is to replace the one in use. Returns the name of the shipped file, and the contents. Raises
    BadFacts."""
    file, document = checked(text)
    _check_read(document, file, in_use(file), "in use")
    _check_together({**{each: in_use(each) for each in FILES}, file: document})
    return file, document


def path_of(directory: str | Path, file: str) -> Path:
    return Path(directory) / f"{PREFIX}{file}"


def rows(document: Document) -> Iterator[tuple[str, Any]]:
    """Rows as written, each with a unique name."""
    for family, written in document.get("families", {}).items():
        for row in written:
            yield f"{family} {row['match']}" + (f" since {row['since']}" if "since" in row else ""), row
    for section in ("apis", "schemas", "priors", "tiers"):
        yield from ((f"{section} {name}", row) for name, row in document.get(section, {}).items())


def _usable(file: str, text: bytes) -> Document:
    found, document = checked(text)
    if found != file:
        raise BadFacts(f"has the contents of {found}")
    _check_read(document, file, shipped(file), "of the release")
    return document


def _check_read(document: Document, file: str, known: Document, whose: str) -> None:
    """A file that was read on a day to come would shadow all files after it."""
    read, latest = document["read"], max(_today(), shipped(file)["read"]) + ABROAD
    if read <= known["read"]:
        raise OldFacts(f"read on {read}, not after the {file} {whose} ({known['read']})")
    if read > latest:
        raise BadFacts(f"read on {read}, a day to come; `read` is the day on which the facts were looked up")


def _today() -> date:
    return datetime.now(UTC).date()


def _check_together(documents: Mapping[str, Document]) -> None:
    """The rows of both files fit together, and no name of this release is lost, which a configuration may have. Raises
    BadFacts."""
    models, rows = (documents.get(file) or shipped(file) for file in FILES)
    check_together(models, rows)
    for section, noun in (("apis", "API"), ("schemas", "schema")):
        if missing := shipped(APIS)[section].keys() - rows[section].keys():
            raise BadFacts(f"the {noun} {min(missing)} is missing")
