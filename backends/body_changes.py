"""Changes of a request's body by path: a member left out, renamed or given another value, messages folded.

Rules:
- A path has the names of a body as sent, without indices: `messages.reasoning_content` is the member of every message.
- The given body is not modified. Untouched values stay the same objects with the same bytes: values may be
  `msgspec.Raw`, and only values that contain the name are decoded, level by level.
- A change whose path is absent has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec
from msgspec import Raw

from backends import member_paths
from backends.member_paths import Act, path_of, walked
from backends.system_turns import folded

Json = dict[str, Any]
Scalar = str | int | float | bool | None

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # in order
_ORDER = (*EFFORTS, "ultra")

_LONGEST = 64  # characters of a path in a header
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")  # there
_object = msgspec.json.Decoder(dict[str, Raw]).decode
_array = msgspec.json.Decoder(list[Raw]).decode
_decode = msgspec.json.Decoder().decode


class ChangeKind(Enum):
    LEAVE_OUT = "left out"
    RENAME = "renamed"
    REPLACE = "replaced"  # a refused value by an accepted value
    PARTS = "parts left out"  # elements of an array whose types are in `values`
    FIT = "fitted"  # body rebuilt for a fact of the server; the path is the fact's name, `values` holds its value
    FOLD = "folded"  # leading system messages merged; later system messages moved into user turns


@dataclass(frozen=True, slots=True)
class BodyChange:
    """`to`: the other name of RENAME. `was`: of REPLACE, the value that is not accepted; empty: whatever is not listed
    in `values`, of which the nearest takes its place. `beside`: path of a member, without which nothing is changed, and
    values of the member, as in `thinking.type=enabled|adaptive`; without values: any. `same`: of RENAME, the names mean
    one thing. `label`: of a metric."""

    kind: ChangeKind
    path: str
    to: str = ""
    was: str = ""
    values: tuple[Scalar, ...] = ()
    beside: str = ""
    same: bool = field(default=False, compare=False)
    label: str = field(default="other", compare=False)

    @property
    def loses(self) -> bool:
        """Something that was asked for does not reach the server under a name that means the same."""
        return self.kind is not ChangeKind.FIT and not (self.kind is ChangeKind.RENAME and self.same)


def changed(body: Mapping[str, Any], changes: Iterable[BodyChange]) -> Json:
    """The body with all changes, in their order."""
    found = dict(body)
    for change in changes:
        if not change.beside or meets(found, change.beside):
            found = _ACTS[change.kind](found, change)
    return found


def holds(body: Mapping[str, Any], path: str) -> bool:
    """The path leads to a member of the body."""
    return bool(values_at(body, path))


def meets(body: Mapping[str, Any], condition: str) -> bool:
    """Of the form of `BodyChange.beside`."""
    path, _, values = condition.partition("=")
    return not {*values.split("|")}.isdisjoint(map(str, values_at(body, path))) if values else holds(body, path)


def values_at(body: Mapping[str, Any], path: str) -> list[Any]:
    """All values at the path, decoded."""
    return list(member_paths.values_at(body, path_of(path)))


def told(changes: Iterable[BodyChange], body: Mapping[str, Any]) -> dict[str, str]:
    """Paths of the body where changes lose content, each with its metric label."""
    lost = [each for each in changes if _takes(each, body) and changed(body, (each,)) != body]
    return {shown(each.label if each.kind is ChangeKind.FOLD else each.path): each.label for each in lost}


def _takes(change: BodyChange, body: Mapping[str, Any]) -> bool:
    return change.loses or (change.kind is ChangeKind.RENAME and holds(body, change.to))


def shown(path: str) -> str:
    """A path made safe for headers and logs: callers choose names of members."""
    return _UNSAFE.sub("_", path[:_LONGEST])


def opened(value: Any) -> Any:
    """Decode the outermost level of a `Raw` value; return any other value as is."""
    if not isinstance(value, Raw):
        return value
    first = bytes(memoryview(value)[:1])
    return _object(value) if first == b"{" else _array(value) if first == b"[" else _decode(value)


def nearest(value: Any, values: Sequence[Scalar]) -> Scalar:
    """The listed effort or number nearest to a value. None: not comparable."""
    if isinstance(value, str) and value in _ORDER:
        place, known = _ORDER.index(value), [each for each in values if each in _ORDER]
        return min(known, key=lambda each: (abs(_ORDER.index(str(each)) - place), each), default=None)
    if type(value) in (int, float):
        numbers = [each for each in values if type(each) in (int, float)]
        return min(numbers, key=lambda each: abs(each - value), default=None)
    return None


# --------------------------------------------------------------------------- acts


def _leave_out(body: Json, change: BodyChange) -> Json:
    return _acted(body, change.path, _without)


def _without(holder: Json, name: str) -> Json:
    return {each: value for each, value in holder.items() if each != name}


def _rename(body: Json, change: BodyChange) -> Json:
    """Rename a member. Where both names are present, the new name's value wins. A dotted name is a path in the body."""

    def act(holder: Json, name: str) -> Json:
        return {**_without(holder, name), change.to: holder.get(change.to, holder[name])}

    if "." not in change.to:
        return _acted(body, change.path, act)
    found = next(iter(values_at(body, change.path)), None)
    outer, _, inner = change.to.partition(".")
    room = opened(body.get(outer)) or {}
    if found is None or not isinstance(room, dict):
        return body
    return {**_leave_out(body, change), outer: {inner: found, **room}}


def _replace(body: Json, change: BodyChange) -> Json:
    """Replace a value by the nearest accepted value. Without a near value the member is removed: the server's default
    applies."""

    def act(holder: Json, name: str) -> Json:
        value = opened(holder[name])
        if (value != change.was if change.was else value in change.values) or isinstance(value, dict | list):
            return holder
        near = change.values[0] if change.was and change.values else nearest(value, change.values)
        return _without(holder, name) if near is None else {**holder, name: near}

    return _acted(body, change.path, act)


def _parts(body: Json, change: BodyChange) -> Json:
    """Remove elements of the listed types from arrays. An array that would become empty stays unchanged."""

    def act(holder: Json, name: str) -> Json:
        parts = opened(holder[name])
        if not isinstance(parts, list):
            return holder
        kept = [each for each in parts if _type(each) not in change.values]
        return holder if len(kept) == len(parts) or not kept else {**holder, name: kept}

    return _acted(body, change.path, act)


def _type(part: Any) -> Any:
    found = opened(part)
    return opened(found.get("type")) if isinstance(found, dict) else None


def _unchanged(body: Json, change: BodyChange) -> Json:
    """Return the body unchanged: FIT is applied where the body is rebuilt."""
    return body


def _fold(body: Json, change: BodyChange) -> Json:
    messages = opened(body.get(change.path))
    if not isinstance(messages, list):
        return body
    found = folded(messages)
    same = len(found) == len(messages) and all(new is old for new, old in zip(found, messages, strict=True))
    return body if same else {**body, change.path: found}


_ACTS: Mapping[ChangeKind, Callable[[Json, BodyChange], Json]] = {
    ChangeKind.LEAVE_OUT: _leave_out,
    ChangeKind.RENAME: _rename,
    ChangeKind.REPLACE: _replace,
    ChangeKind.PARTS: _parts,
    ChangeKind.FIT: _unchanged,
    ChangeKind.FOLD: _fold,
}


def _acted(body: Json, path: str, act: Act) -> Json:
    found: Json = walked(body, path_of(path), act, opened)
    return found
