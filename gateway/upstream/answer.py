"""The answer to one caller: a chain of filters between the attempt and the relay, built once, at the first token.

The filters of a stream, in order: the link of a part to the rest of a broken answer (put at the head once it has
broken), links of parts, the translation into the caller's dialect or ids, the usage that the caller has not asked for,
counts of cached tokens, events that are no JSON. No filter is added anywhere else.

Rules:
- A read goes through the filters and to the caller in one call. A read that no filter has changed keeps its framing.
- Where a filter cannot go on, the failure is returned: what violates the server's own dialect is the server's fault,
  what the gateway cannot express is the gateway's.
- A whole answer is rewritten whole. Until an answer that is put together from a stream is complete, nothing of it is
  written, so its failure can be hidden like any failure before the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from backends.failures import NOT_ASSEMBLED
from backends.interface import Assembler, Failure, Tap
from backends.stream.cost_writer import CostWriter
from backends.stream.redaction import CachedCountMasker, Rewriter, RewritingError, SecretMasker, mask_error_body
from backends.stream.sse import JunkFilter, UsageStripper, WholeEvents
from backends.translation.reply_translation import StreamTranslator
from gateway.api.dialects import error_event
from gateway.upstream.relay import Relay
from gateway.upstream.routed_request import Rewriting, RoutedRequest

KEPT = 64 * 1024  # bytes


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
    """Reads go to the caller as they come. `tap`: of the first attempt; once it has met with an event that is no JSON,
    a last filter removes such events. `translator`: the filter into the caller's dialect, if there is one."""

    written = True

    def __init__(
        self,
        relay: Relay,
        filters: Sequence[Rewriter],
        tap: Tap,
        path: str,
        translator: StreamTranslator | None = None,
    ) -> None:
        self._relay = relay
        self.unwritten = False  # words of the last read have gone through links of parts, and not to the caller
        self._filters = self._base = tuple(filters)  # all, and those without the link to a rest
        self._tap = tap
        self._only = _without_interest_in_tokens(filters)
        self._removes_junk = False
        self._path = path
        self._translator = translator

    def start(self, data: bytes) -> bytes | Failure:
        if self._tap.junk:
            self._remove_junk()
        try:
            for each in self._filters:
                data = each.feed(data)
        except RewritingError as error:
            return error.failure
        return data

    def body(self, data: bytes, framed: bytes = b"") -> Failure | None:
        if self._tap.is_token and self._only is not None and not self._only.held:  # as nearly always
            self._relay.write(data, framed)
            return None
        rewritten = data
        if self._tap.junk and not self._removes_junk:
            self._remove_junk()
        try:
            for each in self._filters:
                rewritten = each.feed(rewritten)
        except RewritingError as error:
            self.unwritten = each is not self._filters[0]
            return error.failure
        self._relay.write(rewritten, framed if rewritten == data else b"")
        return None

    def replace_held(self, data: bytes) -> Failure | None:
        torn = self.drop()
        return self.body(data or torn)

    def finish(self, missing: bytes = b"") -> bytes | Failure:
        try:
            tail = self._close()
        except RewritingError as error:
            return error.failure
        missing = missing if self._translator is None else b""
        return tail + b"\n\n" + missing if tail and missing else tail + missing

    def drop(self) -> bytes:
        """Forget what is held back. Returns the end of an event that has passed in part."""
        torn = b""
        for each in self._filters:
            torn = each.drop() or torn
        return torn

    def continue_with(self, head: Rewriter, begun: bytes) -> Failure | None:
        """Another attempt writes the rest. `begun`: its first events, which `head` has rewritten."""
        for each in self._base:
            each.drop()
        self._filters, self._only = self._base, None
        self.unwritten = False
        failure = self.body(begun) if begun else None
        self._filters = (head, *self._base)
        return failure

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

    def _remove_junk(self) -> None:
        """Add the last filter, which no answer without junk has a need of."""
        junk = JunkFilter()
        self._filters, self._base = (*self._filters, junk), (*self._base, junk)
        self._only, self._removes_junk = None, True

    def _close(self) -> bytes:
        data = b""
        for each in self._filters:
            data = (each.feed(data) if data else b"") + each.close()
        return data


class AssembledAnswer:
    """Events are put together; the whole is rewritten and written at the end. Reads of tokens alone are put together
    KEPT bytes at a time, or with the next read of another form. `counted`: tokens of prompt and answer by the gateway's
    count."""

    written = False

    def __init__(
        self, assembler: Assembler, rewriting: Rewriting, tap: Tap, counted: Callable[[], tuple[int, int]]
    ) -> None:
        self.assembler = assembler
        self._rewriting = rewriting
        self._tap = tap
        self._counted = counted
        self._reads: list[bytes] = []
        self._size = 0

    def start(self, data: bytes) -> bytes | Failure:
        return self._feed(data) or b""

    def body(self, data: bytes, framed: bytes = b"") -> Failure | None:
        self._reads.append(data)
        self._size += len(data)
        return None if self._tap.is_token and self._size < KEPT else self._read_all()

    def _read_all(self) -> Failure | None:
        reads, self._reads, self._size = b"".join(self._reads), [], 0
        return self._feed(reads) if reads else None

    def _feed(self, data: bytes) -> Failure | None:
        self.assembler.feed(data)
        return NOT_ASSEMBLED if self.assembler.obstacle else None

    def replace_held(self, data: bytes) -> Failure | None:
        """The events before an error or junk, which no whole answer may hold."""
        return None

    def finish(self, missing: bytes = b"") -> bytes | Failure:
        if self._read_all() is not None:
            return NOT_ASSEMBLED
        try:
            whole = self.assembler.whole(self._counted)
        except ValueError:
            return NOT_ASSEMBLED
        return whole_reply(self._rewriting, whole)


def _without_interest_in_tokens(filters: Sequence[Rewriter]) -> WholeEvents | None:
    """The only filter, where a token passes it as it is, unless the filter holds something; None: there is no such."""
    only = filters[0] if len(filters) == 1 else None
    return only if isinstance(only, WholeEvents) and type(only) in (WholeEvents, UsageStripper) else None


# --------------------------------------------------------------------------- building


def streamed_answer(
    relay: Relay,
    routed: RoutedRequest,
    rewriting: Rewriting,
    tap: Tap,
    links: Sequence[Rewriter] = (),
    cost: Callable[[], float] | None = None,
) -> StreamedAnswer:
    """The chain for a stream, or for a whole answer that is too long to be held. `links`: of parts. `cost`: of
    the answer so far, in USD, for a caller that wants it."""
    translator: Rewriter | None = None
    filters: list[Rewriter] = [*links]
    if routed.request.stream:
        translator = None if rewriting.answer is None else rewriting.answer.stream()
        filters += [] if translator is None else [translator]
        filters.append(UsageStripper() if routed.hides_usage else WholeEvents() if cost is None else CostWriter(cost))
    else:
        filters.append(SecretMasker(rewriting.secret))
    if rewriting.masks_counts:
        filters.append(CachedCountMasker())
    error_writer = translator if isinstance(translator, StreamTranslator) else None
    return StreamedAnswer(relay, filters, tap, routed.path, error_writer)


def whole_reply(rewriting: Rewriting, reply: bytes) -> bytes | Failure:
    """A complete reply as the caller gets it."""
    reply = mask_error_body(reply, rewriting.secret)
    if rewriting.answer is not None:
        try:
            reply = rewriting.answer.whole(reply)
        except RewritingError as error:
            return error.failure
    return CachedCountMasker().feed(reply) if rewriting.masks_counts else reply
