"""Finds the tool call that each delta of a chat stream belongs to.

Servers differ:

- OpenAI numbers the calls (`index`), with id and name in the first delta of each; parallel calls may come in turns.
- Some give all calls one index, or none, and tell calls apart by id; some repeat id and name in every delta.
- Some send the id, or the name, after a part of the arguments; some send no ids at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backends.translation.tool_arguments import JsonEnd
from backends.translation.translation import Json, KeptTexts
from backends.translation.turn_state.chat_state import merged

AWAITED_ID = 1024  # characters of arguments; a call with more that has no id is taken to have none

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Members of one call in a delta. `text`: piece of the arguments or of a custom tool's input. `state`: members of
    the call and its function outside the dialect."""

    index: int
    identity: str
    name: str
    text: str
    is_custom: bool
    state: Json = field(default_factory=dict)


_CALL = frozenset({"id", "type", "index", "function", "custom"})
_NAMED = frozenset({"name", "arguments", "input"})


def _state(delta: Mapping[str, Any], named: Mapping[str, Any]) -> Json:
    if delta.keys() <= _CALL and named.keys() <= _NAMED:
        return {}
    found = {"call": (delta, _CALL), "function": (named, _NAMED)}
    others = {
        name: {member: value for member, value in members.items() if member not in known and value is not None}
        for name, (members, known) in found.items()
    }
    return {name: members for name, members in others.items() if members}


def call_delta(delta: Mapping[str, Any], place: int) -> CallDelta:
    """`place`: in the list of calls, which counts where there is no index."""
    custom, function, index = delta.get("custom"), delta.get("function"), delta.get("index")
    is_custom = isinstance(custom, Mapping)
    named = custom if isinstance(custom, Mapping) else function if isinstance(function, Mapping) else {}
    text = named.get("input" if is_custom else "arguments")
    if not isinstance(text, str):  # an object, as a few servers write arguments
        text = "" if text is None else _encode(text).decode()
    return CallDelta(
        index=index if type(index) is int else place,
        identity=str(delta.get("id") or ""),
        name=str(named.get("name") or ""),
        text=text,
        is_custom=is_custom,
        state=_state(delta, named),
    )


@dataclass(slots=True)
class StreamedCall:
    """A tool call in progress. `length`: characters of arguments so far."""

    number: int
    identity: str = ""
    name: str = ""
    is_custom: bool = False
    length: int = 0
    end: JsonEnd = field(default_factory=JsonEnd)
    state: Json = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """The call can be written: name and id are known, or no id is awaited any more."""
        return bool(self.name) and (bool(self.identity) or self.length > AWAITED_ID)

    def takes(self, delta: CallDelta) -> bool:
        """False: a delta with this index begins another call."""
        if delta.identity and self.identity:
            return delta.identity == self.identity
        if not delta.name or not self.name or not self.end.is_complete:
            return not delta.identity or delta.name in ("", self.name) or not self.name
        return delta.name == self.name and not delta.text.strip()

    def add(self, delta: CallDelta) -> None:
        self.identity = self.identity or delta.identity
        if not self.name:
            self.name, self.is_custom = delta.name, delta.is_custom
        if delta.state:
            self.state = merged(self.state, delta.state)
        self.length += len(delta.text)
        self.end.feed(delta.text)


class StreamedCalls:
    """Tool calls of an answer, in order of first deltas. `kept`: limits the size of call state."""

    def __init__(self, kept: KeptTexts) -> None:
        self._kept = kept
        self.all: list[StreamedCall] = []
        self._latest: dict[int, StreamedCall] = {}  # by index
        self._known: dict[tuple[int, str], StreamedCall] = {}  # by index and id

    def add(self, delta: CallDelta) -> StreamedCall:
        """Note a delta; return its call. Raises InexpressibleError where the state is too much."""
        if delta.state:
            self._kept.take_state(delta.state)
        call = self._known.get((delta.index, delta.identity)) or self._latest.get(delta.index)
        if call is None or not call.takes(delta):
            call = StreamedCall(len(self.all))
            self.all.append(call)
        if delta.identity:
            self._known[delta.index, delta.identity] = call
        self._latest[delta.index] = call
        call.add(delta)
        return call
