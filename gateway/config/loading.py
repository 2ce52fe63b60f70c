"""Configuration files and environment variables -> a valid Config, or a ConfigError.

Steps: read, merge, validate each section, check between sections. A step runs if the previous one found no problem;
each step reports all of its problems in the order of the lines.

Without a file, API keys in the environment are the configuration: every API with a key becomes a pool, and the first
one receives all requests, model names unchanged.

Reload: `server`, `state` and `telemetry` are fixed at start-up: a difference there is reported as needing a restart.
All other sections take effect at once. The combination may be one that no file contains, so all checks run again.
Differences are reported by path, without values, which may be secrets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from backends.catalog import KINDS
from gateway.config import checks, error_messages
from gateway.config.config_errors import ConfigError, Problem, SourceLocation, dotted
from gateway.config.config_errors import Path as KeyPath
from gateway.config.models import Config
from gateway.config.yaml_source import Document, merge, parse

FIXED_AT_START = ("server", "state", "telemetry")
COMBINED = SourceLocation("config, with server, state and telemetry as at start-up")
_ABSENT = object()


def load(paths: Sequence[Path], environ: Mapping[str, str]) -> Config:
    """Files in order, each merged over the previous ones; without files, the environment."""
    return validated(reduce(merge, _documents(paths, environ)) if paths else _from_environment(environ))


def validated(document: Document) -> Config:
    """Raises ConfigError. `x-...` sections belong to the operator and are ignored."""
    try:
        config = Config.model_validate({k: value for k, value in document.data.items() if not k.startswith("x-")})
    except ValidationError as error:
        raise _error(error_messages.messages(error.errors(), document), document) from None
    if problems := checks.problems(config):
        raise _error(problems, document)
    return config


def _documents(paths: Sequence[Path], environ: Mapping[str, str]) -> list[Document]:
    documents: list[Document] = []
    problems: list[str] = []
    for path in paths:
        try:
            documents.append(parse(path.read_text("utf-8"), str(path), environ))
        except ConfigError as error:
            problems += error.problems
        except OSError as error:
            problems.append(f"{path}: cannot be read: {error.strerror}")
        except UnicodeDecodeError as error:
            problems.append(f"{path}: not UTF-8 text at byte {error.start}")
    if problems:
        raise ConfigError(problems)
    return documents


def _error(problems: Iterable[Problem], document: Document) -> ConfigError:
    located = [(document.location(problem.path), problem) for problem in problems]
    files = ["config", *dict.fromkeys(location.file for location in document.locations.values())]
    located.sort(key=lambda pair: (files.index(pair[0].file), pair[0].line))
    return ConfigError([problem.at(location) for location, problem in located])


def _from_environment(environ: Mapping[str, str]) -> Document:
    document = Document()
    pools: dict[str, Any] = {}
    names = [name for name, kind in KINDS.items() if kind.needs_key]
    for name in names:
        if not environ.get(f"{name.upper()}_API_KEY"):
            continue
        pools[name] = {"backend": name}
        for key in ("api_key", "base_url"):
            variable, path = f"{name.upper()}_{key.upper()}", ("pools", name, key)
            if value := environ.get(variable):
                pools[name][key] = value
                document.locations[path] = SourceLocation(f"environment variable {variable}")
                document.raw[path] = f"${{{variable}}}"
    if not pools:
        variables = ", ".join(f"{name.upper()}_API_KEY" for name in names)
        raise ConfigError(
            [f"no --config, and none of {variables} is set: name a file, set a key, or try `firsttoken demo`"]
        )
    document.data.update(pools=pools, passthrough=next(iter(pools)))
    return document


# ---------------------------------------------------------------- reload


@dataclass(frozen=True, slots=True)
class Change:
    """`config` takes effect. `changed`: paths of its differences; `restart`: paths of the other differences."""

    config: Config
    changed: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()


def change(before: Config, wanted: Config) -> Change:
    """Raises ConfigError if the effective configuration would be invalid."""
    config = wanted.model_copy(update={name: getattr(before, name) for name in FIXED_AT_START})
    if config != wanted and (problems := checks.problems(config)):
        raise ConfigError([problem.at(COMBINED) for problem in problems])
    paths = list(_differences(before.model_dump(), wanted.model_dump(), ()))
    return Change(
        config,
        tuple(dotted(path) for path in paths if path[0] not in FIXED_AT_START),
        tuple(dotted(path) for path in paths if path[0] in FIXED_AT_START),
    )


def _differences(before: object, after: object, path: KeyPath) -> Iterator[KeyPath]:
    """Paths of the innermost different values."""
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        if before != after:
            yield path
        return
    for name in dict.fromkeys([*before, *after]):
        yield from _differences(before.get(name, _ABSENT), after.get(name, _ABSENT), (*path, name))
