"""Puts the tool calls of a chat together, of servers that label their parts in many ways.

A part belongs to the call of its index. Servers leave the index out, give all calls the same one, repeat the name in
every part or change the id from part to part; a part with a name begins another call where
- the call before has another name, and arguments already; or
- its arguments are complete; or
- the id is another one, and no arguments are open.
Every other part continues the call before. After such a guess, or a name that is repeated, arguments that are no JSON
make no answer, nor does a call that is there twice with one id.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.stream.assembly import Differences, Unassembled, joined, keep_first, named
from backends.stream.event_shapes import read_text, written

_CALLED = {"function": "arguments", "custom": "input"}  # text member by the type of a call


class AssembledCalls:
    """The calls of one message so far."""

    def __init__(self, found: Differences) -> None:
        self._found = found
        self._calls: list[tuple[int, AssembledCall]] = []  # with their index, in order of their beginning
        self._guessed = False  # a call was told from others by something else than its index

    def add(self, call: dict[str, Any]) -> None:
        index = call.pop("index", None)
        if type(index) is not int:
            index, known = self._without_index(call)
        else:
            known = next((each for place, each in reversed(self._calls) if place == index), None)
        if known is not None and known.is_ended_by(call):
            self._guess("tool calls with the same index")
            known = None
        if known is None:
            known = AssembledCall(self._found)
            self._calls.append((index, known))
        known.add(call)

    def _without_index(self, call: dict[str, Any]) -> tuple[int, AssembledCall | None]:
        """Index and call that the part is of; None: a new one."""
        self._guess("a tool call without an index")
        own = call.get("id")
        for index, known in reversed(self._calls):
            if own and known.id == own:
                return index, known
        if not self._calls or (own and self._calls[-1][1].id):
            return len(self._calls), None
        return self._calls[-1]

    def _guess(self, what: str) -> None:
        self._guessed = True
        self._found.note(what, of_calls=True)

    def assembled(self, *, was_cut: bool) -> list[dict[str, Any]]:
        """Raises Unassembled where a guess has led to half a call. `was_cut`: the last one may be half."""
        calls = [call for _, call in sorted(self._calls, key=lambda each: each[0])]
        guessed = self._guessed or any(call.is_repeated for call in calls)
        if guessed and not was_cut and not all(call.is_complete for call in calls):
            raise Unassembled("tool calls that cannot be told apart", of_calls=True)
        whole = [call.assembled() for call in calls]
        if guessed and any(call.get("id") and call in whole[:place] for place, call in enumerate(whole)):
            raise Unassembled("a tool call that came twice", of_calls=True)
        return whole


class AssembledCall:
    """A call so far, or the function in it. `text`: the member that comes in parts."""

    def __init__(self, found: Differences, text: str = "") -> None:
        self._found = found
        self._members: dict[str, Any] = {}
        self._more: dict[str, list[Any]] = {}  # names, and members that are not known, in parts
        self._parts: dict[str, AssembledCall] = {}
        self._text_name = text
        self._text = bytearray()

    @property
    def id(self) -> Any:
        return self._members.get("id")

    @property
    def is_complete(self) -> bool:
        """The arguments are JSON, or there are none yet."""
        return all(not part._text or _is_json(part._text) for part in self._parts.values())

    @property
    def is_repeated(self) -> bool:
        """Parts have named the function again: their arguments may be all so far, and not the next."""
        return any(len(part._more.get("name", ())) > 1 for part in self._parts.values())

    def is_ended_by(self, call: dict[str, Any]) -> bool:
        """The part begins another call."""
        for kind, part in self._parts.items():
            given = call.get(kind)
            other = given if isinstance(given, dict) else {}
            name = other.get("name")
            if not name or not (known := part._more.get("name")):
                continue
            if part._text:
                return name not in known or _is_json(part._text)
            text = other.get(part._text_name)
            open_before = isinstance(text, str) and text and name in known and not _is_json(text.encode())
            return bool(self.id and call.get("id") and call["id"] != self.id) and not open_before
        return False

    def add(self, call: dict[str, Any]) -> None:
        for name, value in call.items():
            if name == self._text_name:
                self._text += _written(value or "")
            elif name in _CALLED and isinstance(value, dict):
                if name not in self._parts:
                    self._parts[name] = AssembledCall(self._found, _CALLED[name])
                self._parts[name].add(value)
            elif name in ("id", "type"):
                keep_first(self._members, name, value or None, self._found, of_calls=True)
            else:
                self._add_part(name, value or None)

    def _add_part(self, name: str, value: Any) -> None:
        self._members.setdefault(name, None)
        if value is None:
            return
        if name in self._more:
            self._found.note(f"{named(name)} of a tool call in several parts", of_calls=True)
        self._more.setdefault(name, []).append(value)

    def assembled(self) -> dict[str, Any]:
        whole = {**self._members, **{name: joined(parts) for name, parts in self._more.items()}}
        whole |= {name: part.assembled() for name, part in self._parts.items()}
        return {**whole, self._text_name: read_text(self._text)} if self._text_name else whole


def _is_json(arguments: bytes | bytearray) -> bool:
    try:
        msgspec.json.decode(read_text(bytes(arguments)))
    except ValueError:
        return False
    return True


def _written(text: Any) -> bytes:
    if not isinstance(text, str):
        raise Unassembled("a text of unknown form")
    return written(text)
