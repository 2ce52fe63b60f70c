"""Answers of backends that speak Responses natively: the ids of state that stays with the backend are sealed.

Sealed are the ids of responses and conversations, and encrypted content, wherever the dialect has them; all other bytes
stay as they are. Of a stream, only the few events with such members are decoded: an event of a token costs one search.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from backends.stream.sse import ServerSentEvent, SseDecoder, StreamError
from backends.translation.reply_translation import ReplyShapeError
from gateway.parts.responses.state_ids import StateIds

# Names of members with state. Within a text, quotes are escaped.
_MARKS = (b'"response"', b'"encrypted_content"')
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class SealedAnswer(ABC):
    """An answer of `endpoint` whose ids are sealed in place. `marks`: in the data of the events that have ids."""

    marks: Sequence[bytes]

    def __init__(self, ids: StateIds, endpoint: str) -> None:
        self._ids, self._endpoint = ids, endpoint

    def whole(self, reply: bytes) -> bytes:
        """Raises ReplyShapeError."""
        try:
            found = _decode(reply)
        except (ValueError, RecursionError) as error:
            raise ReplyShapeError(type(error).__name__) from None
        if isinstance(found, dict):
            self.seal_reply(found)
        return _encode(found)

    def stream(self) -> StateStream:
        return StateStream(self._sealed, self.marks)

    def _sealed(self, data: bytes) -> bytes:
        """The data of an event with sealed ids."""
        try:
            event = _decode(data)
        except (ValueError, RecursionError):
            return data  # the tap has judged it
        if not isinstance(event, dict):
            return data
        self.seal_event(event)
        return _encode(event)

    @abstractmethod
    def seal_reply(self, reply: dict[str, Any]) -> None: ...

    @abstractmethod
    def seal_event(self, event: dict[str, Any]) -> None: ...

    def seal(self, members: dict[str, Any], name: str) -> None:
        """Seal the id in a member, if there is one."""
        if isinstance(value := members.get(name), str) and value:
            members[name] = self._ids.seal(value, self._endpoint)


class StateAnswer(SealedAnswer):
    """A response, a conversation's items, or a list."""

    marks = _MARKS

    def seal_event(self, event: dict[str, Any]) -> None:
        if isinstance(response := event.get("response"), dict):
            self.seal_reply(response)
        self._seal_item(event.get("item"))

    def seal_reply(self, reply: dict[str, Any]) -> None:
        if reply.get("object") != "list":
            for name in ("id", "previous_response_id"):
                self.seal(reply, name)
            self.seal(reply, "conversation")
            if isinstance(conversation := reply.get("conversation"), dict):
                self.seal(conversation, "id")
        for name in ("output", "data"):
            items = reply.get(name)
            for item in items if isinstance(items, list) else ():
                self._seal_item(item)

    def _seal_item(self, item: Any) -> None:
        if isinstance(item, dict) and isinstance(content := item.get("encrypted_content"), str) and content:
            item["encrypted_content"] = self._ids.seal_content(content, self._endpoint)


class StateStream:
    """A `Rewriter` of an event stream. `seal`: the data of an event, sealed. `marks`: of the events with state."""

    def __init__(self, seal: Callable[[bytes], bytes], marks: Sequence[bytes]) -> None:
        self._decoder = SseDecoder()
        self._seal = seal
        self._marks = marks

    def feed(self, data: bytes) -> bytes:
        """Raises ReplyShapeError."""
        if not self._decoder.pending and data.endswith(b"\n\n") and not any(mark in data for mark in self._marks):
            return data
        try:
            return b"".join(map(self._sealed, self._decoder.feed(data)))
        except StreamError as error:
            raise ReplyShapeError(type(error).__name__) from None

    def drop(self) -> bytes:
        self._decoder = SseDecoder()
        return b""

    def close(self) -> bytes:
        return b"".join(map(self._sealed, self._decoder.flush()))

    def _sealed(self, event: ServerSentEvent) -> bytes:
        if any(mark in event.data for mark in self._marks):
            event.data = self._seal(event.data)
        return bytes(event)
