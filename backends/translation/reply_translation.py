"""Translates one answer into the caller's dialect, over a chain of translations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from backends.failures import NOT_JSON, UNTRANSLATED
from backends.interface import Failure
from backends.stream.redaction import Rewriter, RewritingError
from backends.translation.translation import (
    NO_CONTEXT,
    AnswerContext,
    EventTranslator,
    InexpressibleError,
    Translation,
    decode_event,
)

# Raised for unknown shapes.
SHAPE_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


# Raised for replies that are valid in their dialect: some nest deeper or hold larger numbers than an encoder can write.
_INEXPRESSIBLE = (InexpressibleError, ArithmeticError, RecursionError)


class ReplyShapeError(RewritingError):
    """A reply cannot be translated.

    `malformed`:

    - True: the reply is not JSON, or violates its dialect: a fault of the backend.
    - False: the reply is valid, but the caller's dialect cannot express the content: no fault of the backend.
    """

    def __init__(self, reason: str, *, malformed: bool = True) -> None:
        super().__init__(reason)
        self.malformed = malformed
        self.failure = NOT_JSON if malformed else UNTRANSLATED


@contextmanager
def _reply_errors() -> Iterator[None]:
    """Raises ReplyShapeError for all that a translation raises."""
    try:
        yield
    except _INEXPRESSIBLE as error:
        raise ReplyShapeError(f"{type(error).__name__}: {error}", malformed=False) from None
    except SHAPE_ERRORS as error:
        raise ReplyShapeError(type(error).__name__) from None


_encode = msgspec.json.Encoder().encode


class RewrittenAnswer(Protocol):
    """An answer that reaches the caller in other bytes than the backend's."""

    def whole(self, reply: bytes) -> bytes:
        """Rewrite an answer that is not streamed. Raises ReplyShapeError."""
        ...

    def stream(self) -> Rewriter:
        """Rewriter of a stream; raises ReplyShapeError."""
        ...


class AnswerTranslation:
    """`translations`: in the order of the request, from the caller's operation to the backend's. `bodies`: of the
    request at each of these steps, the caller's own first. `context`: for the step that the caller reads."""

    def __init__(
        self,
        translations: Sequence[Translation],
        bodies: Sequence[Mapping[str, Any]],
        context: AnswerContext = NO_CONTEXT,
    ) -> None:
        first = next((each for each in translations if each.caller is not each.backend), None)
        contexts = [context if each is first else NO_CONTEXT for each in translations]
        self._steps = list(zip(reversed(translations), reversed(bodies), reversed(contexts), strict=True))

    def whole(self, reply: bytes) -> bytes:
        """Translate an answer that is not streamed. Raises ReplyShapeError."""
        with _reply_errors():
            translated = decode_event(reply)
            for translation, body, context in self._steps:
                translated = translation.reply(translated, body, context)
            return _encode(translated)

    def stream(self) -> StreamTranslator:
        return StreamTranslator([translation.stream(body, context) for translation, body, context in self._steps])


class StreamTranslator:
    """A `Rewriter` of an event stream into the caller's dialect."""

    def __init__(self, steps: Sequence[EventTranslator]) -> None:
        self._steps = steps

    def feed(self, data: bytes) -> bytes:
        """Raises ReplyShapeError."""
        with _reply_errors():
            for step in self._steps:
                data = step.feed(data)
        return data

    def drop(self) -> bytes:
        for step in self._steps:
            step.drop()
        return b""

    def close(self) -> bytes:
        """End the body. Raises ReplyShapeError."""
        data = b""
        with _reply_errors():
            for step in self._steps:
                data = step.feed(data) + step.close()
        return data

    def error(self, failure: Failure) -> bytes:
        """The events that end the caller's stream by an error."""
        return self._steps[-1].error(failure)
