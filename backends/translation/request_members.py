"""Members of a request on their way to another dialect: every member is taken, dropped by name, or refused.

By tables of known members between chat and Messages, and by `Members`, which counts what was taken, between chat and
Responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from backends.translation.omissions import Omissions
from backends.translation.translation import Json, UntranslatableError

# Members of chat completions and of Responses with the same name and meaning.
SAME_MEMBERS = tuple(
    "model stream temperature top_p parallel_tool_calls metadata moderation prompt_cache_key prompt_cache_options "
    "prompt_cache_retention safety_identifier service_tier user".split()
)
ANY = object()  # a member is known whatever its value is
LABEL = object()  # a member without effect on the answer, which the backend's dialect does not have
HINT = object()  # a member that may be left out, noted whatever its value: 0 is not absence
_NEVER_DROPPED = frozenset({"model", "messages", "system", "tools", "max_tokens", "stream"})


def present(body: Mapping[str, Any], dropped: Omissions) -> Json:
    """Members with a value, without members dropped by the route, which are noted."""
    return {
        name: value
        for name, value in body.items()
        if value is not None and (name in _NEVER_DROPPED or not dropped.drop(name))
    }


def refuse(param: str, dropped: Omissions, reason: str = "") -> None:
    """Refuse a member without an equivalent, unless the route drops the member by name or path."""
    if not dropped.drop(param):
        raise UntranslatableError(param, reason and f"'{param}' cannot be expressed: {reason}")


def refuse_others(members: Mapping[str, Any], known: Mapping[str, Any], within: str, dropped: Omissions) -> None:
    """Refuse members that are not `known`, and note labels as left out. `known`: by name, the value that says nothing;
    ANY where each is read; LABEL; HINT."""
    for name, value in members.items():
        if value is None or (name in known and known[name] in (ANY, value)):
            continue
        path = f"{within}.{name}" if within else name
        if known.get(name) not in (LABEL, HINT):
            refuse(path, dropped)
        elif value or known[name] is HINT:
            dropped.leave_out(path)


class Members:
    """Reads an object member by member; null is the same as absent.

    `path`: place of the object in the body, for errors. `dropped`: members to leave out, by name or by path
    (`tools.strict`).
    """

    def __init__(self, members: Any, dropped: Omissions, path: str = "") -> None:
        if not isinstance(members, Mapping):
            raise UntranslatableError(path, f"'{path}' must be an object")
        self.path, self.dropped = path, dropped
        self._left = {name: value for name, value in members.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str) -> Any:
        """Value of a member; None: absent."""
        return self._left.pop(name, None)

    def take_all(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Take all present members among `names`."""
        return {name: self._left.pop(name) for name in names if name in self._left}

    def rest(self) -> dict[str, Any]:
        """Take all remaining members."""
        left, self._left = self._left, {}
        return left

    def text(self, name: str) -> str:
        """Value of a required string. Raises UntranslatableError."""
        value = self.take(name)
        if type(value) is not str:
            raise UntranslatableError(self.at(name), f"'{self.at(name)}' must be a string")
        return value

    def kind(self) -> str:
        """The member `type`; empty: absent."""
        value = self.take("type")
        return "" if value is None else str(value)

    def object(self, name: str) -> Members:
        """The object in a required member. Raises UntranslatableError."""
        return Members(self.take(name), self.dropped, self.at(name))

    def array(self, name: str) -> list[Any]:
        """Elements of an array; none if it is absent. Raises UntranslatableError."""
        return self._array(name, self.take(name))

    def objects(self, name: str) -> Iterator[Members]:
        """The objects of an array; none if it is absent. Raises UntranslatableError."""
        return self.each(name, self.take(name))

    def each(self, name: str, values: Any) -> Iterator[Members]:
        """The objects of `values`, taken from `name`. Raises UntranslatableError."""
        numbered = enumerate(self._array(name, values))
        return (Members(value, self.dropped, f"{self.at(name)}[{place}]") for place, value in numbered)

    def _array(self, name: str, values: Any) -> list[Any]:
        if values is not None and type(values) is not list:
            raise UntranslatableError(self.at(name), f"'{self.at(name)}' must be an array")
        return values or []

    def content(
        self, readers: Mapping[str, PartReader], name: str = "content", of_reply: tuple[str, ...] = ()
    ) -> str | list[Json]:
        """Text, or parts translated by the reader of each part's type. `of_reply`: part members to drop. Raises
        UntranslatableError."""
        if type(value := self.take(name)) is str:
            return value
        parts = []
        for part in self.each(name, value):
            kind = part.kind()
            if (read := readers.get(kind)) is None:
                part.refuse_kind(kind)
                continue
            part.take_all(of_reply)
            if (found := read(part)) is not None:
                parts.append({**found, **part.take_all(("prompt_cache_breakpoint",))})
                part.close()
        return parts

    def default(self, name: str, *meaningless: Any) -> None:
        """Accept a member with its default value; refuse any other value."""
        value = self.take(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in meaningless):
            self.refuse(name)

    def refuse(self, name: str, reason: str = "") -> None:
        """Raises UntranslatableError unless the member is to be dropped."""
        if not self.dropped.drop(self.at(name)):
            raise UntranslatableError(self.at(name), reason)

    def refuse_kind(self, kind: str) -> None:
        """Raises UntranslatableError for the whole object, unless objects of its type are to be dropped, by the type or
        by the path with the type (`tools.web_search`)."""
        if not self.dropped.drop(self.at(kind)):
            shown = f"'{self.path}' of type '{kind[:64]}'"
            raise UntranslatableError(self.path, f"{shown} cannot be expressed in the dialect of the backend")

    def label(self, name: str) -> None:
        """Leave out a member without effect on the answer, which the backend's dialect does not have."""
        if self.take(name):
            self.dropped.leave_out(self.at(name))

    def hint(self, name: str, *meaningless: Any) -> None:
        """Leave out a member with little effect, which the backend's dialect does not have."""
        value = self.take(name)
        if value is not None and value not in meaningless:
            self.dropped.leave_out(self.at(name))

    def close(self) -> None:
        """Refuse what was not taken. Raises UntranslatableError."""
        for name in self._left:
            self.refuse(name)


PartReader = Callable[[Members], Json | None]  # of a part of a content; None: the part is dropped

# Parts of content that chat completions and Responses write alike.


def read_refusal(part: Members) -> Json:
    return {"type": "refusal", "refusal": part.text("refusal")}


def read_audio(part: Members) -> Json:
    return {"type": "input_audio", "input_audio": part.take("input_audio")}
