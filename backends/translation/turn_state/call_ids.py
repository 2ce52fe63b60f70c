"""Ids of tool calls as callers get them.

- A call without an id gets an id of 16 random characters. So does a call whose id is already in the history or the
  answer: servers restart numbering in every answer, and clients and other servers pair results by id.
- Members of a call besides id, name and arguments are provider state, sealed into the id, which every client returns.
  An id with characters that other servers refuse is sealed as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from secrets import token_hex
from typing import Any

from backends.translation.translation import NO_CONTEXT, AnswerContext
from backends.translation.turn_state.seals import id_of_call, sealed

_LONGEST = 64  # characters
PLAIN = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # accepted by every server without an id format of its own


def made_id(prefix: str = "call_") -> str:
    return prefix + token_hex(8)


def plain_id(call_id: Any) -> str:
    """A server's call id in characters that every server accepts, the same for a call and its result. A long id ends
    with a hash: ids that differ at their ends stay apart."""
    text = str(call_id)
    if PLAIN.fullmatch(text):
        return text
    plain = re.sub(r"[^a-zA-Z0-9_-]", "_", text) or "call_"
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 17]}_{sha256(text.encode()).hexdigest()[:16]}"


class CallIds:
    """Call ids of one answer. `body`: the caller's request."""

    __slots__ = ("_body", "_context", "_used")

    def __init__(self, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> None:
        self._body, self._context = body, context
        self._used: set[str] | None = None  # ids of the history and of the answer so far

    def given(self, own: str, state: Mapping[str, Any] | None = None) -> str:
        """The id that the caller gets. `own`: of the server; empty: none. `state`: other members of the call."""
        if self._used is None:
            self._used = set(_history(self._body))
        maker = self._context.maker
        found = own if own and own not in self._used else made_id()
        self._used.add(found)
        if maker and (state or not PLAIN.fullmatch(found)):
            members = {"id": found, **({"state": state} if state else {})}
            return sealed(maker, members)
        return found


def _history(body: Mapping[str, Any]) -> Iterator[str]:
    """The servers' own ids of all calls in a request of any dialect."""
    for turn in (*_listed(body.get("messages")), *_listed(body.get("input"))):
        for call in (turn, *_listed(turn.get("tool_calls")), *_listed(turn.get("content"))):
            for name in ("id", "call_id"):
                if isinstance(value := call.get(name), str):
                    yield id_of_call(value) or value


def _listed(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
