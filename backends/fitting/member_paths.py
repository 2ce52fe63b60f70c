"""Members of a body by their paths, through arrays and undecoded JSON.

A path names members without indices: `("messages", "tool_calls", "id")` is the id of every call of every message.
Bodies are never changed in place: a function returns the same object where nothing changes. `Raw` JSON is decoded only
where it holds the last name of the path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

Json = dict[str, Any]
Path = tuple[str, ...]

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


def altered(value: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy of `value` with `change` applied to each member at the path. ABSENT removes the member."""
    if isinstance(value, Raw):
        if path and b'"%b"' % path[-1].encode() not in bytes(value):
            return value
        decoded = _decode(value)
        found = altered(decoded, path, change)
        return value if found is decoded else found
    if not path:
        return change(value)
    if isinstance(value, list):
        return _altered_list(value, path, change)
    if not isinstance(value, Mapping) or path[0] not in value:
        return value
    found = altered(value[path[0]], path[1:], change)
    if found is value[path[0]]:
        return value
    if found is ABSENT:
        return {name: each for name, each in value.items() if name != path[0]}
    return {**value, path[0]: found}


def _altered_list(values: list[Any], path: Path, change: Callable[[Any], Any]) -> list[Any]:
    found = [altered(each, path, change) for each in values]
    if all(new is old for new, old in zip(found, values, strict=True)):
        return values
    return found


def values_at(value: Any, path: Path) -> Iterator[Any]:
    """The members at the path, decoded."""
    if isinstance(value, Raw):
        if path and b'"%b"' % path[-1].encode() not in bytes(value):
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
