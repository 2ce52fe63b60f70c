"""Puts the events of a chat or completion together. Rules: `backends.stream.assembly`.

- Texts, arguments, token ids and the lists of log-probabilities are joined; calls are told apart by their index.
- A content without text is null beside a call, a refusal or reasoning, as servers write it.
- An answer is complete with a finish_reason of every choice and with its usage.
- An event of the first choice in the last known form adds its text without being parsed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.stream.assembly import (
    ASSEMBLED_LIMIT,
    TOO_LARGE,
    EventAssembler,
    Unassembled,
    encode,
    keep_once,
    keep_same,
)
from backends.stream.token_form import TokenForm, read_text, written
from backends.stream.whole_forms import WholeForm, filled

_TEXTS = frozenset({"content", "refusal", "reasoning", "reasoning_content"})  # of a delta, to be joined
_LATEST = frozenset({"created", "usage", "system_fingerprint", "service_tier", "metrics"})  # the last one counts
_PADDING = "obfuscation"  # of OpenAI's events
_OBJECTS = {"chat.completion.chunk": "chat.completion"}  # by name of an event's object


class ChoicesAssembler(EventAssembler):
    """An `Assembler`. `choices`: of the answer."""

    def __init__(self, form: WholeForm, choices: int = 1) -> None:
        super().__init__()
        self._whole_form = form
        self._expected = choices
        self._body: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}
        self._form = TokenForm()

    def feed(self, data: bytes) -> None:
        if self._ended or self._decoder.pending or not (text := self._form.text(data)):
            self._parse(data)
            return
        self._choices[0].add_written(text)  # as nearly always
        self._size += len(text)
        if self._size > ASSEMBLED_LIMIT:
            self.refuse(TOO_LARGE)

    def _parse(self, data: bytes) -> None:
        super().feed(data)
        if 0 in self._choices and (added := self._choices[0].take_added()):
            self._form.learn(data, added)

    def _add(self, chunk: dict[str, Any], data: bytes) -> None:
        for choice in _list_of(chunk.pop("choices", None)):
            index = choice.pop("index", 0)
            if type(index) is not int or not 0 <= index < self._expected:
                raise Unassembled("a choice that was not asked for")
            self._choices.setdefault(index, _Choice()).add(choice)
        chunk.pop(_PADDING, None)
        for name, value in chunk.items():
            if name in _LATEST and value is not None:
                self._body[name] = value
            else:
                keep_same(self._body, name, value)

    def _assembled(self) -> bytes:
        if len(self._choices) < self._expected or not isinstance(self._body.get("usage"), dict):
            raise Unassembled("the stream ends before its end")
        form = self._whole_form
        kind = self._body.get("object")
        body = {**self._body, "object": _OBJECTS.get(str(kind), kind)}
        body["choices"] = [self._choices[index].assembled(index, form) for index in range(self._expected)]
        return encode(filled(body, form.body, form.parts))

    def _forget(self) -> None:
        self._body, self._choices = {}, {}
        self._form = TokenForm()


class _Choice:
    """A choice so far."""

    def __init__(self) -> None:
        self._members: dict[str, Any] = {}
        self._message: dict[str, Any] = {}
        self._texts: dict[str, bytearray] = {}  # as written in JSON, by member; "text" of a completion
        self._token_ids, self._logprobs = _Lists(), _Lists()
        self._annotations = _Lists()
        self._calls: dict[int, _StreamedCall] = {}
        self._function_call: _StreamedCall | None = None
        self._is_chat = False
        self._added = ""  # text of the last event, if it has added nothing else

    def take_added(self) -> str:
        """The text of the last event, once; empty if the event has had another effect."""
        added, self._added = self._added, ""
        return added

    def add_written(self, text: bytes) -> None:
        """Add a text, as written, to the member that the last event has added to."""
        self._texts["content" if self._is_chat else "text"] += text

    def add(self, choice: dict[str, Any]) -> None:
        plain = not any(value for name, value in choice.items() if name not in ("delta", "text"))
        for name, value in choice.items():
            if name == "delta":
                self._is_chat = True
                self._add_delta(value or {})
            elif name == "text":
                self._add_text(name, value)
            elif name == "token_ids":
                self._token_ids.add(name, value)
            elif name == "logprobs":
                self._members.setdefault(name, None)
                for part, items in (value or {}).items():
                    self._logprobs.add(part, items)
            else:
                keep_same(self._members, name, value)
        delta = choice.get("delta") or {}
        alone = plain and not any(value for name, value in delta.items() if name != "content")
        self._added = (delta.get("content") or choice.get("text") or "") if alone else ""

    def _add_delta(self, delta: dict[str, Any]) -> None:
        for name, value in delta.items():
            if name in _TEXTS:
                self._add_text(name, value)
            elif name == "tool_calls":
                for call in _list_of(value):
                    self._add_call(call)
            elif name == "function_call" and value:
                self._function_call = self._function_call or _StreamedCall("arguments")
                self._function_call.add(value)
            elif name == "annotations":
                self._annotations.add(name, value)
            elif name == "role":
                keep_same(self._message, name, value)
            else:
                keep_once(self._message, name, value)

    def _add_text(self, name: str, text: Any) -> None:
        if text is None:
            self._message.setdefault(name, None)
        elif isinstance(text, str):
            self._texts.setdefault(name, bytearray()).extend(_written(text))
        else:
            raise Unassembled(f"'{name}' that is no text")

    def _add_call(self, call: dict[str, Any]) -> None:
        index = call.pop("index", None)
        if type(index) is not int:
            raise Unassembled("a tool call without an index")
        self._calls.setdefault(index, _StreamedCall()).add(call)

    def assembled(self, index: int, form: WholeForm) -> dict[str, Any]:
        if not self._members.get("finish_reason"):
            raise Unassembled("a choice without a finish_reason")
        members = {"index": index, **self._members, **self._token_ids.joined()}
        if logprobs := self._logprobs.joined():
            members["logprobs"] = logprobs
        if self._is_chat:
            members["message"] = filled(self._whole_message(form), form.message, form.parts)
        else:
            members["text"] = read_text(self._texts.get("text", b""))
        return filled(members, form.choice, form.parts)

    def _whole_message(self, form: WholeForm) -> dict[str, Any]:
        message = {"role": "assistant", "content": None, **self._message, **self._annotations.joined()}
        message |= {name: read_text(text) for name, text in self._texts.items() if text}
        if self._calls:
            message["tool_calls"] = [self._calls[index].assembled() for index in sorted(self._calls)]
        if self._function_call is not None:
            message["function_call"] = self._function_call.assembled()
        more = any(message.get(name) for name in (*_TEXTS, "tool_calls", "function_call", "audio"))
        if not more and "content" in self._texts:
            message["content"] = ""
        return message


class _StreamedCall:
    """A call so far, or the function in it. `text`: the member that comes in parts."""

    def __init__(self, text: str = "") -> None:
        self._members: dict[str, Any] = {}
        self._parts: dict[str, _StreamedCall] = {}
        self._text_name = text
        self._text = bytearray()

    def add(self, call: dict[str, Any]) -> None:
        for name, value in call.items():
            if name == self._text_name:
                self._text += _written(value or "")
            elif name in _CALLED and isinstance(value, dict):
                self._parts.setdefault(name, _StreamedCall(_CALLED[name])).add(value)
            elif name in ("id", "type"):
                keep_same(self._members, name, value or None)
            else:
                keep_once(self._members, name, value or None)

    def assembled(self) -> dict[str, Any]:
        whole = {**self._members, **{name: part.assembled() for name, part in self._parts.items()}}
        return {**whole, self._text_name: read_text(self._text)} if self._text_name else whole


class _Lists:
    """Lists in parts, by name; kept as written, a fraction of the objects' size. Null where no list comes."""

    def __init__(self) -> None:
        self._items: dict[str, bytearray | None] = {}

    def add(self, name: str, items: Any) -> None:
        known = self._items.setdefault(name, None)
        if items is None:
            return
        if not isinstance(items, list):
            raise Unassembled(f"'{name}' that is no list")
        if known is None:
            known = self._items[name] = bytearray()
        if items:
            known += (b"," if known else b"") + encode(items)[1:-1]

    def joined(self) -> dict[str, Any]:
        return {
            name: None if items is None else msgspec.Raw(b"[" + items + b"]") for name, items in self._items.items()
        }


_CALLED = {"function": "arguments", "custom": "input"}  # text member by the type of a call


def _list_of(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Unassembled("a list of unknown form")
    return value


def _written(text: Any) -> bytes:
    if not isinstance(text, str):
        raise Unassembled("a text of unknown form")
    return written(text)
