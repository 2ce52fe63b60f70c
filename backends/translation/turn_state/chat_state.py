"""Provider state in a chat's message or deltas, to be returned with text, reasoning and calls in the next turn.

- `reasoning_details` (openrouter.ai/docs, reasoning tokens): parts with a text, a signature or a cipher, and their ids
  and formats. Pieces of a streamed detail are joined by its index.
- Members of a message or call outside the dialect, such as `extra_content`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from backends.translation.translation import Json, KeptTexts

MEMBERS = ("extra_content", "provider_specific_fields", "thinking_blocks", "reasoning_opaque", "thought_signature")
_TEXTS = {"reasoning.text": "text", "reasoning.summary": "summary"}  # member with the text, by type of the detail
_PIECES = ("text", "summary")


def text_member(detail: Mapping[str, Any]) -> str:
    """Name of the text member of a detail; empty: no text."""
    return _TEXTS.get(str(detail.get("type")), "")


def details_of(message: Mapping[str, Any]) -> list[Json]:
    found = message.get("reasoning_details")
    return [dict(each) for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def details_text(details: Iterable[Mapping[str, Any]]) -> str:
    return "".join(str(each.get(text_member(each)) or "") for each in details)


def is_thought(message: Mapping[str, Any]) -> bool:
    """The content of a delta is marked as a thought (`extra_content: {PROVIDER: {thought: true}}`)."""
    extra = message.get("extra_content")
    marks = extra.values() if isinstance(extra, Mapping) else ()
    return any(isinstance(each, Mapping) and each.get("thought") is True for each in marks)


def members_of(message: Mapping[str, Any]) -> Json:
    """Provider state other than `reasoning_details`. Thought marks are removed."""
    found = {name: value for name in MEMBERS if (value := message.get(name))}
    if found and is_thought(message):
        others = {name: _without_mark(each) for name, each in message["extra_content"].items()}
        found["extra_content"] = {name: each for name, each in others.items() if each}
    return {name: value for name, value in found.items() if value}


def _without_mark(extra: Any) -> Any:
    return {name: value for name, value in extra.items() if name != "thought"} if isinstance(extra, dict) else extra


class ChatState:
    """Provider state of the deltas so far, not yet sealed. `kept`: limits the total size kept of an answer."""

    __slots__ = ("_calls", "_details", "_kept", "_members")

    def __init__(self, kept: KeptTexts) -> None:
        self._kept = kept
        self._details: list[Json] = []
        self._members: Json = {}
        self._calls: Json = {}

    def add(self, delta: Mapping[str, Any]) -> None:
        """Note the state of a delta. Raises InexpressibleError where it is too much."""
        for detail in details_of(delta):
            self._kept.take_state(detail)
            self._add_detail(detail)
        if members := members_of(delta):
            self._kept.take_state(members)
            self._members = merged(self._members, members)

    def add_late(self, call_id: str, state: Json) -> None:
        """Add state of a call whose id was already sent to the caller."""
        self._calls[call_id] = merged(self._calls.get(call_id, {}), state)

    def take(self, text: str = "") -> Json:
        """Return the state, once; empty: there is none. `text`: the caller gets it beside the state, so the only detail
        with this very text is kept without."""
        details, members, calls = self._details, self._members, self._calls
        self._details, self._members = [], {}
        self._calls = {}
        state: Json = _without_text(details, text) if details else {}
        return state | ({"message": members} if members else {}) | ({"calls": calls} if calls else {})

    def _add_detail(self, detail: Json) -> None:
        last = self._details[-1] if self._details else None
        if last is None or any(last.get(name) != detail.get(name) for name in ("type", "index")) or _ended(last):
            self._details.append(detail)
            return
        for name, value in detail.items():
            if value is not None:
                last[name] = str(last.get(name) or "") + value if name in _PIECES and isinstance(value, str) else value


def _ended(detail: Mapping[str, Any]) -> bool:
    """True if a detail is complete: signature or encrypted data has arrived."""
    return bool(detail.get("signature") or detail.get("data"))


def _without_text(details: list[Json], text: str) -> Json:
    with_text = [place for place, each in enumerate(details) if each.get(text_member(each))]
    place = with_text[0] if with_text else 0
    member = text_member(details[place])
    if len(with_text) != 1 or details[place][member] != text:
        return {"details": details}
    order = list(details[place]).index(member)
    kept = {name: value for name, value in details[place].items() if name != member}
    return {"details": [*details[:place], kept, *details[place + 1 :]], "text": [place, member, order]}


def restored(state: Mapping[str, Any], text: str) -> list[Json]:
    """Restore the details of a state, with the text from the caller's history."""
    details = [dict(each) for each in state.get("details") or () if isinstance(each, Mapping)]
    match state.get("text"):
        case [int(place), str(member), int(order)] if 0 <= place < len(details):
            members = list(details[place].items())
            details[place] = dict([*members[:order], (member, text), *members[order:]])
    return details


def merged(known: Json, more: Mapping[str, Any]) -> Json:
    """Objects are merged; of other values the later counts."""
    if not more:
        return known
    both = {
        name: merged(known[name], value) if isinstance(known.get(name), dict) and isinstance(value, dict) else value
        for name, value in more.items()
    }
    return {**known, **both}
