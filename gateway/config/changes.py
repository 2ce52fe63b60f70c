"""Compares a new configuration with the one in force: allowed changes, and their names.

Rules:
- Sockets, processes and exporters are made at the start: `server`, `state` and `telemetry` stay as they are, and
  changes
  there are reported as needing a restart. Everything else applies at once.
- The configuration that comes into force may therefore differ from the file. The whole of it is checked again.
- Changes are named by path, without values, which may be secrets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from gateway.config import checks
from gateway.config.config_errors import ConfigError, Path, SourceLocation, dotted
from gateway.config.models import Config

AT_THE_START = ("server", "state", "telemetry")
NOW = "config, its server, state and telemetry as they were at the start"  # the path of values that no file contains


@dataclass(frozen=True, slots=True)
class Change:
    """`config` comes into force. `changed`: paths that differ from the previous configuration; `restart`: paths that
    differ in the file but need a restart."""

    config: Config
    changed: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()


def change(before: Config, wanted: Config) -> Change:
    """Raises ConfigError if the part of `wanted` that can change makes an invalid configuration."""
    config = wanted.model_copy(update={name: getattr(before, name) for name in AT_THE_START})
    if config != wanted and (problems := checks.problems(config)):
        raise ConfigError([problem.at(SourceLocation(NOW)) for problem in problems])
    places = [*_differences(before, wanted, ())]
    return Change(
        config,
        tuple(dotted(path) for path in places if path[0] not in AT_THE_START),
        tuple(dotted(path) for path in places if path[0] in AT_THE_START),
    )


def _differences(before: object, after: object, path: Path) -> Iterator[Path]:
    """The innermost named paths."""
    if before == after:
        return
    ours, theirs = _named(before), _named(after)
    if ours is None or theirs is None or type(before) is not type(after):
        yield path
        return
    for name in dict.fromkeys([*ours, *theirs]):
        if name in ours and name in theirs:
            yield from _differences(ours[name], theirs[name], (*path, name))
        else:
            yield (*path, name)


def _named(value: object) -> Mapping[str, object] | None:
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    return value if isinstance(value, Mapping) else None
