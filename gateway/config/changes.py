"""Reload: which differences between two configurations take effect in a running gateway.

Rules:
- `server`, `state` and `telemetry` are fixed at start-up: their old values stay, and a restart is reported as
  necessary. All other sections take effect at once.
- The combination may be one that no file contains, so it is checked as a whole.
- Differences are reported by path, without values, which may be secrets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from gateway.config import checks
from gateway.config.config_errors import ConfigError, Path, SourceLocation, dotted
from gateway.config.models import Config

FIXED_AT_START = ("server", "state", "telemetry")
COMBINED = SourceLocation("config, with server, state and telemetry as at start-up")


@dataclass(frozen=True, slots=True)
class Change:
    """`config` takes effect. `changed`: paths of its differences; `restart`: paths of differences that do not."""

    config: Config
    changed: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()


def change(before: Config, wanted: Config) -> Change:
    """Raises ConfigError if the effective configuration would be invalid."""
    config = wanted.model_copy(update={name: getattr(before, name) for name in FIXED_AT_START})
    if config != wanted and (problems := checks.problems(config)):
        raise ConfigError([problem.at(COMBINED) for problem in problems])
    paths = list(_differences(before, wanted, ()))
    return Change(
        config,
        tuple(dotted(path) for path in paths if path[0] not in FIXED_AT_START),
        tuple(dotted(path) for path in paths if path[0] in FIXED_AT_START),
    )


def _differences(before: object, after: object, path: Path) -> Iterator[Path]:
    """The innermost named values that differ."""
    if before == after:
        return
    old, new = _fields(before), _fields(after)
    if old is None or new is None or type(before) is not type(after):
        yield path
        return
    for name in dict.fromkeys([*old, *new]):
        if name in old and name in new:
            yield from _differences(old[name], new[name], (*path, name))
        else:
            yield (*path, name)


def _fields(value: object) -> Mapping[str, object] | None:
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    return value if isinstance(value, Mapping) else None
