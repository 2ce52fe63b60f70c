"""Members of a body by their paths, through arrays and undecoded JSON.

A path names members without indices: `("messages", "tool_calls", "id")` is the id of every call of every message.
Bodies are never changed in place: a function returns the same object where nothing changes. `Raw` JSON is decoded only
where it holds the last name of the path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import Raw

Json = dict[str, Any]
Path = tuple[str, ...]

Act = Callable[[Json, str], Json]  # an object, and the name of a member that it holds
Decode = Callable[[Any], Any]

_decode = msgspec.json.Decoder().decode


class Absent:
    """Returned for a member that is to be left out."""


ABSENT: Final = Absent()


def path_of(text: str) -> Path:
    return tuple(text.split("."))


def opened(value: Any) -> Any:
    """Decode a `Raw` value; return any other value as is."""
    return _decode(value) if isinstance(value, Raw) else value


def objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of an array, decoded; none of any other value."""
    value = opened(value)
    return [each for each in map(opened, value) if isinstance(each, Mapping)] if isinstance(value, list) else []


@lru_cache(1024)
def _quoted(name: str) -> bytes:
    """A name as it stands in JSON."""
    return f'"{name}"'.encode()


def walked(value: Any, path: Path, act: Act, decode: Decode = opened) -> Any:
    """A copy of `value` with `act` applied to each object that holds the last name of the path. `decode`: of `Raw`
    values on the way."""
    if isinstance(value, Raw):
        if _quoted(path[-1]) not in bytes(value):
            return value
        decoded = decode(value)
        found = walked(decoded, path, act, decode)
        return value if found is decoded else found
    if isinstance(value, list):
        return _walked_list(value, path, act, decode)
    if not isinstance(value, dict) or path[0] not in value:
        return value
    if len(path) == 1:
        return act(value, path[0])
    found = walked(value[path[0]], path[1:], act, decode)
    return value if found is value[path[0]] else {**value, path[0]: found}


def _walked_list(values: list[Any], path: Path, act: Act, decode: Decode) -> list[Any]:
    found = [walked(each, path, act, decode) for each in values]
    return values if all(new is old for new, old in zip(found, values, strict=True)) else found


def altered(value: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy of `value` with `change` applied to each member at the path, decoded. ABSENT removes the member."""

    def act(holder: Json, name: str) -> Json:
        given = opened(holder[name])
        found = change(given)
        if found is given:
            return holder
        return without(holder, name) if found is ABSENT else {**holder, name: found}

    return walked(value, path, act)


def values_at(value: Any, path: Path) -> Iterator[Any]:
    """The members at the path, decoded."""
    if isinstance(value, Raw):
        if path and _quoted(path[-1]) not in bytes(value):
            return
        value = _decode(value)
    if not path:
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from values_at(each, path)
    elif isinstance(value, Mapping) and path[0] in value:
        yield from values_at(value[path[0]], path[1:])


def value_at(value: Any, path: Path) -> Any:
    """The first member at the path; None: there is none."""
    return next(values_at(value, path), None)


def without(body: Json, *names: str) -> Json:
    """A copy of the body without the named top-level members."""
    return {name: value for name, value in body.items() if name not in names}


def put(body: Json, path: Path, value: Any) -> Json:
    """The body with a member at the path, through objects that may be missing. ABSENT: without, and without an object
    that has nothing else."""
    if len(path) > 1:
        inner = opened(body.get(path[0]))
        inner = put(dict(inner) if isinstance(inner, Mapping) else {}, path[1:], value)
        value = inner or ABSENT
    if value is ABSENT:
        return without(body, path[0])
    return {**body, path[0]: value}
