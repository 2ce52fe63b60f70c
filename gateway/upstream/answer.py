"""The answer to one caller: a chain of filters between the attempt and the relay, built once, at the first token.

The filters of a stream, in order: the continuation of a broken answer (after a rescue, which puts it at the head), the
text kept for a rescue, the translation into the caller's dialect or ids, the usage that the caller has not asked for,
events that are no JSON, counts of cached tokens. No filter is added anywhere else.

Rules:
- A read goes through the filters and to the caller in one call. A read that no filter has changed keeps its framing.
- Where a filter cannot go on, the failure is returned: what violates the server's own dialect is the server's fault,
  what the gateway cannot express is the gateway's.
- A whole answer is rewritten whole. Until an answer that is put together from a stream is complete, nothing of it is
  written, so its failure can be hidden like any failure before the first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from backends.failures import DIVERGED, NOT_ASSEMBLED, NOT_JSON, UNTRANSLATED
from backends.interface import Assembler, Failure
from backends.stream.continuation import Diverged
from backends.stream.redaction import CachedCountMasker, Rewriter, SecretMasker, mask_error_body
from backends.stream.sse import JunkFilter, UsageStripper, WholeEvents
from backends.translation.reply_translation import ReplyShapeError, StreamTranslator
from gateway.api.dialects import error_event
from gateway.upstream.relay import Relay
from gateway.upstream.routed_request import RoutedRequest
from gateway.upstream.upstream import Upstream
from policies.types import Endpoint


class JunkCount(Protocol):
    """The tap of an attempt."""

    junk: int


class JunkGate:
    """Passes everything on until the tap has met with an event that is no JSON; from then on without such events."""

    def __init__(self, tap: JunkCount) -> None:
        self._tap = tap
        self._filter = JunkFilter()

    def feed(self, data: bytes) -> bytes:
        return self._filter.feed(data) if self._tap.junk else data

    def drop(self) -> bytes:
        return self._filter.drop()

    def close(self) -> bytes:
        return self._filter.close()


class Answer(Protocol):
    """Receiver of a committed attempt. Called within the read that brought the bytes: no method may wait."""

    written: bool  # a part of the answer has reached the caller

    def start(self, data: bytes) -> bytes | Failure:
        """The first bytes for the caller."""
        ...

    def body(self, data: bytes, framed: bytes = b"") -> Failure | None:
        """Body bytes of a read; `framed`: the same with HTTP framing, if the read was exactly one chunk."""
        ...

    def replace_held(self, data: bytes) -> Failure | None:
        """Complete events in place of all bytes held back; nothing else of the body follows."""
        ...

    def finish(self, missing: bytes = b"") -> bytes | Failure:
        """The last bytes for the caller, once the answer is complete. `missing`: the last event, if the server has not
        sent it."""
        ...


class StreamedAnswer:
    """Reads go to the caller as they come. `translator`: the filter into the caller's dialect, if there is one."""

    written = True

    def __init__(
        self, relay: Relay, filters: Sequence[Rewriter], path: str, translator: StreamTranslator | None = None
    ) -> None:
        self._relay = relay
        self._base = self._filters = filters
        self._path = path
        self._translator = translator

    def start(self, data: bytes) -> bytes | Failure:
        try:
            return self._feed(data)
        except (Diverged, ReplyShapeError) as error:
            return _failure_of(error)

    def body(self, data: bytes, framed: bytes = b"") -> Failure | None:
        rewritten = data
        try:
            for each in self._filters:
                rewritten = each.feed(rewritten)
        except (Diverged, ReplyShapeError) as error:
            return _failure_of(error)
        self._relay.write(rewritten, framed if rewritten == data else b"")
        return None

    def replace_held(self, data: bytes) -> Failure | None:
        torn = self.drop()
        return self.body(data or torn)

    def finish(self, missing: bytes = b"") -> bytes | Failure:
        try:
            tail = self._close()
        except (Diverged, ReplyShapeError) as error:
            return _failure_of(error)
        missing = missing if self._translator is None else b""
        return tail + b"\n\n" + missing if tail and missing else tail + missing

    def drop(self) -> bytes:
        """Forget what is held back. Returns the end of an event that has passed in part."""
        torn = b""
        for each in self._filters:
            torn = each.drop() or torn
        return torn

    def continue_with(self, head: Rewriter) -> None:
        """A peer goes on where the stream broke."""
        for each in self._base:
            each.drop()
        self._filters = (head, *self._base)

    def error(self, failure: Failure, own_event: bytes = b"") -> bytes:
        """The last bytes of an answer that cannot be completed. `own_event`: the server's own error event."""
        torn = self.drop()
        if self._translator is not None:
            return torn + self._translator.error(failure)
        if not own_event:
            return torn + error_event(failure, self._path)
        for each in self._base:
            own_event = each.feed(own_event)
        return torn + own_event

    def _feed(self, data: bytes) -> bytes:
        for each in self._filters:
            data = each.feed(data)
        return data

    def _close(self) -> bytes:
        data = b""
        for each in self._filters:
            data = (each.feed(data) if data else b"") + each.close()
        return data


class AssembledAnswer:
    """Events are put together; the whole is rewritten and written at the end."""

    written = False

    def __init__(self, assembler: Assembler, routed: RoutedRequest, upstream: Upstream, endpoint: Endpoint) -> None:
        self._assembler = assembler
        self._routed = routed
        self._upstream = upstream
        self._endpoint = endpoint

    def start(self, data: bytes) -> bytes | Failure:
        return self.body(data) or b""

    def body(self, data: bytes, framed: bytes = b"") -> Failure | None:
        self._assembler.feed(data)
        return NOT_ASSEMBLED if self._assembler.obstacle else None

    def replace_held(self, data: bytes) -> Failure | None:
        """The events before an error or junk, which no whole answer may hold."""
        return None

    def finish(self, missing: bytes = b"") -> bytes | Failure:
        try:
            whole = self._assembler.whole()
        except ValueError:
            return NOT_ASSEMBLED
        return whole_reply(self._routed, self._upstream, self._endpoint, whole)


def _failure_of(error: Exception) -> Failure:
    if isinstance(error, ReplyShapeError):
        return NOT_JSON if error.malformed else UNTRANSLATED
    return DIVERGED


# --------------------------------------------------------------------------- building


def streamed_answer(
    relay: Relay,
    routed: RoutedRequest,
    upstream: Upstream,
    endpoint: Endpoint,
    tap: JunkCount,
    remembered: Sequence[Rewriter] = (),
) -> StreamedAnswer:
    """The chain for a stream, or for a whole answer that is too long to be held. `remembered`: for a rescue."""
    rewritten = routed.rewritten_answer(endpoint)
    translator: Rewriter | None = None
    filters: list[Rewriter] = [*remembered]
    if routed.request.stream:
        translator = None if rewritten is None else rewritten.stream()
        filters += [] if translator is None else [translator]
        filters += [UsageStripper() if routed.hides_usage else WholeEvents(), JunkGate(tap)]
    else:
        filters.append(SecretMasker(upstream.backend.secret))
    if routed.masks_counts(endpoint):
        filters.append(CachedCountMasker())
    return StreamedAnswer(relay, filters, routed.path, translator if isinstance(translator, StreamTranslator) else None)


def whole_reply(routed: RoutedRequest, upstream: Upstream, endpoint: Endpoint, reply: bytes) -> bytes | Failure:
    """A complete reply as the caller gets it."""
    rewritten = routed.rewritten_answer(endpoint)
    reply = mask_error_body(reply, upstream.backend.secret)
    if rewritten is not None:
        try:
            reply = rewritten.whole(reply)
        except ReplyShapeError as error:
            return _failure_of(error)
    return CachedCountMasker().feed(reply) if routed.masks_counts(endpoint) else reply
