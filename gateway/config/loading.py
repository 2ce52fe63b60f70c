"""Loads files and environment into a valid Config, or raises ConfigError with every fix.

In order: read, merge, validate by section, check across sections. A step runs if the one before found no problem; a
step
reports all its problems, in the order of the file's lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path

from pydantic import ValidationError

from gateway.config import checks
from gateway.config import error_messages as wording
from gateway.config.config_errors import ConfigError, Problem
from gateway.config.env_config import environment
from gateway.config.models import Config
from gateway.config.yaml_source import Document, merge, parse

__all__ = ["ConfigError", "load", "validated"]


def load(paths: Sequence[Path], environ: Mapping[str, str]) -> Config:
    """Merges each file over the ones before; without files, uses the environment."""
    return validated(reduce(merge, _documents(paths, environ)) if paths else environment(environ))


def validated(document: Document) -> Config:
    """Validates the document."""
    try:
        config = Config.model_validate(_without_extensions(document))
    except ValidationError as error:
        raise _refusal(wording.messages(error.errors(), document), document) from None
    if found := checks.problems(config):
        raise _refusal(found, document)
    return config


def _documents(paths: Sequence[Path], environ: Mapping[str, str]) -> list[Document]:
    documents: list[Document] = []
    problems: list[str] = []
    for path in paths:
        try:
            documents.append(parse(_text(path), str(path), environ))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return documents


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 text at byte {error.start}"]) from None


def _without_extensions(document: Document) -> dict[str, object]:
    """`x-...` sections are the operator's own: a place for anchors."""
    return {key: value for key, value in document.data.items() if not key.startswith("x-")}


def _refusal(problems: Iterable[Problem], document: Document) -> ConfigError:
    placed = [(document.place(problem.path), problem) for problem in problems]
    files = list(dict.fromkeys(place.file for place in document.places.values()))
    placed.sort(key=lambda pair: (files.index(pair[0].file) if pair[0].file in files else -1, pair[0].line))
    return ConfigError([problem.at(place) for place, problem in placed])
