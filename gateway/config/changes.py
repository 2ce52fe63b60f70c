"""From one configuration to the next, in a gateway that runs: what may change, and what did.

Rules:
- Sockets, processes and where news goes are given at the start: `server`, `state` and `telemetry` stay as they are, and
  it is said that they need a restart. The rest applies at once: who mends a route must not have to restart for it.
- So what comes into force may be what no file says. It is checked as a whole, like any other.
- Places are named, values are not: they may be secrets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from gateway.config import checks
from gateway.config.config_errors import ConfigError, Path, SourceLocation, dotted
from gateway.config.models import Config

AT_THE_START = ("server", "state", "telemetry")
NOW = "config, its server, state and telemetry as they were at the start"  # the place of what no file says


@dataclass(frozen=True, slots=True)
class Change:
    """`config` is to come into force. `changed` are the places in which it differs from the one before, `restart` those
    that differ and stay as they were."""

    config: Config
    changed: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()


def change(before: Config, wanted: Config) -> Change:
    """Raises ConfigError where `wanted` cannot come into force as far as it may."""
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
    """The innermost places that have a name."""
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
