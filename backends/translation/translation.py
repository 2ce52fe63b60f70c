"""Interface of translations: a caller's dialect, spoken through a backend that knows another dialect.

A translation turns the caller's request into the backend's, and the backend's reply or event stream into the caller's.
Rules:
- A member without an equivalent raises `UntranslatableError` with its name, before anything is sent. It is left out,
  and noted in `Omissions`, where the route drops it by name, and where it is a label without effect on an answer.
  Nothing is lost silently, nothing invented.
- `X_to_Y` is for a caller who speaks X, before a server that speaks Y: `request.py` turns X into Y, `answer.py` turns
  reply and events back into X.
- Translations are pure and know nothing of sockets or routes. A chain of two joins any pair of dialects through chat.
- An event is translated alone, on arrival: a translated stream has no more delay than an untouched one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from backends import failures
from backends.interface import Failure, Operation
from backends.stream.sse import ServerSentEvent, SseDecoder
from backends.translation.omissions import Omissions

Json = dict[str, Any]

KEPT_LIMIT = 64 << 20  # bytes of kept texts: 400,000 tokens and more
TEXT_OVERHEAD = 64  # bytes of a string

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class UntranslatableError(ValueError):
    """A member of a request has no equivalent in the backend's dialect."""

    def __init__(self, param: str, reason: str = "") -> None:
        super().__init__(reason or f"'{param}' cannot be expressed in the dialect of the backend")
        self.param = param


class InexpressibleError(Exception):
    """A reply is valid in the backend's dialect, and has no form in the caller's."""


class KeptTexts:
    """Bounds the memory for texts of a stream that wait to be written, or to be repeated at the end."""

    def __init__(self) -> None:
        self._left = KEPT_LIMIT

    def take(self, text: str) -> None:
        """Raises InexpressibleError above the limit."""
        self._take(len(text))

    def take_state(self, state: Mapping[str, Any]) -> None:
        """The same of members of any form."""
        self._take(len(_encode(state)))

    def _take(self, size: int) -> None:
        self._left -= size + TEXT_OVERHEAD
        if self._left < 0:
            raise InexpressibleError("the answer is too long to be translated")


class EventTranslator:
    """Rewrites an event stream of one dialect into another; a `Rewriter` of the relay."""

    def __init__(self) -> None:
        self._decoder = SseDecoder()
        self._kept = KeptTexts()

    def feed(self, data: bytes) -> bytes:
        """Translate the events completed by `data`."""
        return b"".join(map(self.translate, self._decoder.feed(data)))

    def drop(self) -> bytes:
        """Forget an incomplete event. Returns nothing: no event passes in part."""
        self._decoder = SseDecoder()
        return b""

    def close(self) -> bytes:
        """End the stream; return what is left to write."""
        return b"".join(map(self.translate, self._decoder.flush()))

    def translate(self, event: ServerSentEvent) -> bytes:
        """Return the caller's events for one event of the backend; empty: there is none."""
        raise NotImplementedError

    def error(self, failure: Failure) -> bytes:
        """Return the events that end the caller's stream by an error."""
        raise NotImplementedError


class ChatEvents(EventTranslator):
    """Rewrites an event stream into the chunks of a chat. `ended`: nothing more is to be written."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = False

    def error(self, failure: Failure) -> bytes:
        if self.ended:
            return b""
        self.ended = True
        error = {"message": failure.message, "type": failure.type, "param": failure.param, "code": failure.code}
        return sse({"error": error})


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """Facts of an answer beside the caller's request. `maker`: digest of the account and the model
    that write it; empty: state of turns is not sealed. `prompt_tokens`: estimate of the prompt; None: there is none."""

    maker: str = ""
    prompt_tokens: int | None = None


NO_CONTEXT = AnswerContext()


class TranslateRequest(Protocol):
    def __call__(self, body: Mapping[str, Any], dropped: Omissions) -> Json:
        """Translate a request body; members left out are noted in `dropped`. Raises UntranslatableError."""
        ...


class TranslateReply(Protocol):
    def __call__(self, reply: Json, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT, /) -> Json:
        """The caller's reply. `body`: the request at this step, the caller's own in the caller's dialect."""
        ...


class TranslateStream(Protocol):
    def __call__(self, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT, /) -> EventTranslator:
        """A translator for one event stream."""
        ...


@dataclass(frozen=True, slots=True)
class Translation:
    """Service of `caller` requests by backends that speak `backend`.

    `reply` and `stream` get the caller's own request body too: some replies repeat parts of it.
    """

    caller: Operation
    backend: Operation
    request: TranslateRequest
    reply: TranslateReply
    stream: TranslateStream


def sse(event: Mapping[str, Any], name: str = "") -> bytes:
    """An event as written on the wire."""
    return bytes(ServerSentEvent(name.encode(), _encode(event)))


def decode_event(data: bytes) -> Any:
    """Decode the data of an event; None: no JSON. Additions of Python servers, and bytes in no UTF-8, become what JSON
    can say."""
    try:
        return _decode(data)
    except (ValueError, RecursionError):
        pass
    try:
        decoded = failures.decode_leniently(data.decode("utf-8", "replace").encode())
        lenient = json.dumps(decoded, ensure_ascii=False).encode("utf-8", "replace")
        return json.loads(lenient, parse_int=_bounded)
    except (ValueError, RecursionError):
        return None


def _bounded(digits: str) -> float:
    """An integer that JSON encoders can write."""
    return int(digits) if len(digits) < 19 else float(digits)
