"""Puts the events of a chat or completion together. Rules: `backends.stream.assembly`.

- Texts, arguments, token ids and the lists of log-probabilities are joined; calls are told apart by their index
  (`backends.stream.assembled_calls`).
- A content without text is null beside a call, a refusal or reasoning, as servers write it; one in parts of text alone
  is a text.
- Members of a delta that are not known are joined as OpenAI's SDKs join them.
- An answer is complete with a finish_reason of every choice, with its usage or a count of the gateway.
- An event of the first choice in the last known form adds its text without being parsed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.stream.assembled_calls import AssembledCall, AssembledCalls
from backends.stream.assembly import (
    ASSEMBLED_LIMIT,
    TOO_LARGE,
    Counted,
    Differences,
    EventAssembler,
    Unassembled,
    encode,
    joined,
    keep_first,
    keep_latest,
    named,
)
from backends.stream.event_shapes import TokenForm, read_text, written
from backends.stream.whole_forms import WholeForm, filled

_TEXTS = frozenset({"content", "refusal", "reasoning", "reasoning_content"})  # of a delta, to be joined
_LATEST = frozenset({"created", "usage", "system_fingerprint", "service_tier", "metrics"})  # the last one counts
_LABELS = frozenset({"id", "object", "model"})  # the first one counts
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
        if not (self._ended or self._decoder.pending):
            texts, size = self._form.leading(data)
            if texts:
                self._add_known(b"".join(texts))
                data = data[size:]
        if data:
            self._parse(data)

    def _add_known(self, text: bytes) -> None:
        self._choices[0].add_written(text)
        self._size += len(text)
        if self._size > ASSEMBLED_LIMIT:
            self.refuse(TOO_LARGE)

    def _parse(self, data: bytes) -> None:
        super().feed(data)
        if 0 in self._choices and (added := self._choices[0].take_added()):
            self._form.learn(data[data.rfind(b"\n\n", 0, -2) + 2 :] if data.count(b"\n\n") > 1 else data, added)

    def _add(self, chunk: dict[str, Any], data: bytes) -> None:
        for choice in _list_of(chunk.pop("choices", None)):
            index = choice.pop("index", 0)
            if type(index) is not int or not 0 <= index < self._expected:
                raise Unassembled("a choice that was not asked for")
            if index not in self._choices:
                self._choices[index] = _Choice(self.found)
            self._choices[index].add(choice)
        chunk.pop(_PADDING, None)
        for name, value in chunk.items():
            if name in _LATEST and value is not None:
                self._body[name] = value
            elif name in _LABELS:
                keep_first(self._body, name, value, self.found)
            else:
                keep_latest(self._body, name, value, self.found)

    def _assembled(self, counted: Counted | None) -> bytes:
        usage = self._body.get("usage")
        if len(self._choices) < self._expected or (counted is None and not isinstance(usage, dict)):
            raise Unassembled("the stream ends before its end")
        form = self._whole_form
        kind = self._body.get("object")
        body = {**self._body, "object": _OBJECTS.get(str(kind), kind)}
        if counted is not None:
            body["usage"] = self._with_counts(usage, counted)
        body["choices"] = [self._choices[index].assembled(index, form) for index in range(self._expected)]
        return encode(filled(body, form.body, form.parts, self.found))

    def _with_counts(self, usage: Any, counted: Counted) -> dict[str, Any]:
        """The usage, with the gateway's own counts where the server tells none."""
        known = usage if isinstance(usage, dict) else {}
        if all(type(known.get(name)) in (int, float) for name in ("prompt_tokens", "completion_tokens")):
            return known
        self.found.note("no usage in the stream")
        prompt, completion = counted()
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {**counts, **known}

    def _forget(self) -> None:
        self._body, self._choices = {}, {}
        self._form = TokenForm()


class _Choice:
    """A choice so far."""

    def __init__(self, found: Differences) -> None:
        self._found = found
        self._members: dict[str, Any] = {}
        self._message: dict[str, Any] = {}
        self._more: dict[str, list[Any]] = {}  # parts of members that are not known
        self._texts: dict[str, bytearray] = {}  # as written in JSON, by member; "text" of a completion
        self._parts: list[dict[str, Any]] = []  # of a content that is no text
        self._token_ids, self._logprobs = _Lists(), _Lists()
        self._annotations = _Lists()
        self._calls = AssembledCalls(found)
        self._function_call: AssembledCall | None = None
        self._is_chat = False
        self._added = ""  # text of the last event, if it has added nothing else

    def take_added(self) -> str:
        """The text of the last event, once; empty if the event has had another effect."""
        added, self._added = self._added, ""
        return added

    def add_written(self, text: bytes) -> None:
        """Add a text, as written, to the member that the last known event has added to."""
        name = "content" if self._is_chat else "text"
        if self._parts:
            self._add_text(name, read_text(text))
        else:
            self._texts.setdefault(name, bytearray()).extend(text)

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
                keep_latest(self._members, name, value, self._found)
        delta = choice.get("delta") or {}
        alone = plain and not self._parts and not any(value for name, value in delta.items() if name != "content")
        self._added = (delta.get("content") or choice.get("text") or "") if alone else ""

    def _add_delta(self, delta: dict[str, Any]) -> None:
        for name, value in delta.items():
            if name in _TEXTS:
                self._add_text(name, value)
            elif name == "tool_calls":
                for call in _list_of(value):
                    self._calls.add(call)
            elif name == "function_call" and value:
                self._function_call = self._function_call or AssembledCall(self._found, "arguments")
                self._function_call.add(value)
            elif name == "annotations":
                self._annotations.add(name, value)
            elif name == "role":
                keep_first(self._message, name, value, self._found)
            else:
                self._add_unknown(name, value)

    def _add_unknown(self, name: str, value: Any) -> None:
        self._message.setdefault(name, None)
        if value is None:
            return
        if name in self._more:
            if name == "audio":
                raise Unassembled("audio in several parts")
            self._found.note(f"{named(name)} in several parts")
        self._more.setdefault(name, []).append(value)

    def _add_text(self, name: str, text: Any) -> None:
        if text is None:
            self._message.setdefault(name, None)
        elif name == "content" and (self._parts or isinstance(text, list)):
            self._add_parts(text)
        elif isinstance(text, str):
            self._texts.setdefault(name, bytearray()).extend(_written(text))
        else:
            raise Unassembled(f"'{name}' that is no text")

    def _add_parts(self, content: Any) -> None:
        """A content of Mistral's kind: texts, thoughts and references in a list."""
        self._found.note("content in parts")
        if not self._parts and (before := self._texts.pop("content", None)):
            self._parts.append({"type": "text", "text": read_text(before)})
        self._parts += _list_of([{"type": "text", "text": content}] if isinstance(content, str) else content)

    def assembled(self, index: int, form: WholeForm) -> dict[str, Any]:
        if not self._members.get("finish_reason"):
            raise Unassembled("a choice without a finish_reason")
        members = {"index": index, **self._members, **self._token_ids.joined()}
        if logprobs := self._logprobs.joined():
            members["logprobs"] = logprobs
        if self._has_lost_words:
            raise Unassembled("an answer that is in no delta")
        if self._is_chat:
            members["message"] = filled(self._whole_message(form), form.message, form.parts, self._found)
        else:
            members["text"] = read_text(self._texts.get("text", b""))
        return filled(members, form.choice, form.parts, self._found)

    @property
    def _has_lost_words(self) -> bool:
        """No event had a delta, or a text; or the texts of a chat are beside its deltas."""
        if not self._is_chat:
            return "text" not in self._texts
        return bool(self._texts.get("text")) and not self._texts.get("content")

    def _whole_message(self, form: WholeForm) -> dict[str, Any]:
        message = {"role": "assistant", "content": None, **self._message, **self._annotations.joined()}
        message |= {name: joined(parts) for name, parts in self._more.items()}
        message |= {name: read_text(text) for name, text in self._texts.items() if text}
        if self._parts:
            message["content"] = _content_of(self._parts)
        if calls := self._calls.assembled(was_cut=self._members["finish_reason"] == "length"):
            message["tool_calls"] = calls
        if self._function_call is not None:
            message["function_call"] = self._function_call.assembled()
        more = any(message.get(name) for name in (*_TEXTS, "tool_calls", "function_call", "audio"))
        if not more and "content" in self._texts:
            message["content"] = ""
        return message


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


def _content_of(parts: list[dict[str, Any]]) -> Any:
    """The content: a text, or parts of which neighbours of a kind are one."""
    merged: list[dict[str, Any]] = []
    for part in parts:
        if merged and part.get("type") in ("text", "thinking") and merged[-1].get("type") == part.get("type"):
            merged[-1] = {**merged[-1], **{name: _joined_in(merged[-1], part, name) for name in part}}
        else:
            merged.append(part)
    plain = len(merged) == 1 and merged[0].keys() == {"type", "text"} and isinstance(merged[0]["text"], str)
    return merged[0]["text"] if plain and merged[0]["type"] == "text" else merged


def _joined_in(before: dict[str, Any], part: dict[str, Any], name: str) -> Any:
    known, value = before.get(name), part[name]
    if name in ("text", "thinking") and isinstance(known, str) and isinstance(value, str):
        return known + value
    if isinstance(known, list) and isinstance(value, list):
        found = _content_of(_list_of([*known, *value]))
        return [{"type": "text", "text": found}] if isinstance(found, str) else found
    return value


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
