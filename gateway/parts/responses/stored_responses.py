"""Requests about a stored response (retrieve, delete, list the input, cancel), sent to the endpoint with the response.

Rules:
- Such a request is no inference: neither queued nor measured nor retried. A lost endpoint is reported at once.
- A large reply to GET needs a place, from its first byte to the last that the caller has read: one for each key,
  LARGE_PLACES in all. Beyond, callers wait. A reply is fetched without a place first, and again if it is large.
- Large replies are rewritten one at a time, in a thread: 1 ms for a MB, in which no other thread runs.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from time import monotonic
from urllib.parse import parse_qs, quote
from weakref import WeakValueDictionary

from backends.failures import NOT_SERVED, TOO_LARGE, TransportError, of_callers_key
from backends.http.connection_pool import BufferedReply
from backends.interface import Failure, FailureKind, HttpCall, Operation
from backends.stream.redaction import CachedCountMasker, mask_error_body
from backends.translation.reply_translation import ReplyShapeError
from gateway.admission.auth import Tenant
from gateway.api.api_error import ApiError, bad_request, retry_later
from gateway.core.hooks import SidePath
from gateway.core.part import Part
from gateway.downstream.answer_headers import gateway_headers
from gateway.downstream.http_request import HttpRequest
from gateway.observe.timeline import RequestTimeline
from gateway.parts.responses.kept_state import state_ids
from gateway.parts.responses.state_answer import StateAnswer
from gateway.parts.responses.state_ids import StateHolder, StateIds
from gateway.proxy import LABELS
from gateway.upstream.routed_request import Upstream
from gateway.wiring import Core

TIMEOUT = 10.0  # s
RETRY = 1.0  # s until a caller may ask a lost endpoint again
LARGE = 150_000  # bytes of a stored response: more is rewritten in a thread, and needs a place
LIMIT = 16 << 20  # bytes of a stored response, which may hold images
ACTION_LIMIT = 1 << 20  # bytes of the reply to a deletion or a cancellation, which needs no place
LARGE_PLACES = 4
PLACE_WAIT = 10.0  # s for a place
READ_WAIT = 60.0  # s for a caller to read a large reply

PATHS = {  # with their methods
    "/v1/responses/{id}": ("GET", "DELETE"),
    "/v1/responses/{id}/input_items": ("GET",),
    "/v1/responses/{id}/cancel": ("POST",),
}
_QUERY = re.compile(r"[!-~]*")
_UNAVAILABLE = (FailureKind.AUTH, FailureKind.MISCONFIGURED, FailureKind.QUOTA)  # nothing that a caller could mend


class LargeReplies:
    """The places of large replies in a process."""

    def __init__(self) -> None:
        self.rewriting = asyncio.Lock()
        self._all = asyncio.Semaphore(LARGE_PLACES)
        self._own: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def enter(self, key: str, until_read: AsyncExitStack) -> None:
        """Wait for a place, to be left with `until_read`. Raises ApiError (503)."""
        own = self._own.setdefault(key, asyncio.Lock())
        try:
            async with asyncio.timeout(PLACE_WAIT):
                await until_read.enter_async_context(own)
                await until_read.enter_async_context(self._all)
        except TimeoutError:
            message = "Other large stored responses are being read; try again."
            raise ApiError(503, message, type="server_error", code="overloaded", headers=retry_later(RETRY)) from None


class StoredPaths(Part):
    """The paths of a process."""

    def __init__(self, core: Core) -> None:
        self._proxy = core.proxy
        self._large = LargeReplies()
        label = LABELS[Operation.RESPONSES]
        self.side_paths = {path: SidePath(methods, label, self.answer) for path, methods in PATHS.items()}

    async def answer(self, http: HttpRequest, tenant: Tenant, timeline: RequestTimeline) -> None:
        """From the endpoint with the response."""
        proxy = self._proxy
        runtime = proxy.runtime.current
        routes = [route for route in runtime.routes.all if tenant.may_use(route.name)]
        stored = StoredResponses(
            key=tenant.name,
            upstream=partial(proxy.upstream_of, http, routes),
            masked_pools=runtime.masked_pools,
            ids=state_ids(runtime, tenant),
            large=self._large,
        )
        async with AsyncExitStack() as until_read:
            status, body = await stored.answer(http, runtime.endpoints(*routes), until_read)
            http.respond(status, body, gateway_headers(timeline, monotonic()))
            timeline.delivered(status, monotonic())
            await http.writer.drain(READ_WAIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponses:
    """Responses stored for the key `key`. `upstream`: of an endpoint, as the caller uses it."""

    key: str
    upstream: Callable[[str], Upstream]
    masked_pools: frozenset[str]
    ids: StateIds
    large: LargeReplies

    async def answer(
        self, http: HttpRequest, endpoints: Collection[str], until_read: AsyncExitStack
    ) -> tuple[int, bytes]:
        """Status and body. `endpoints`: those open to the caller. `until_read`: to be closed when the caller has read
        the body. Raises ApiError."""
        holder = self.ids.open(http.model, endpoints)
        if holder is None:
            raise _not_found(http.model)
        upstream = self.upstream(holder.endpoint)
        if "stream" in parse_qs(http.query):
            raise bad_request("A stored response cannot be streamed here.", "stream")
        try:
            reply = await self._fetch(_call(http, holder, upstream), upstream, until_read)
        except TransportError as error:
            raise (_too_large() if error.failure is TOO_LARGE else _unreachable(error.failure)) from None
        if not 200 <= reply.status < 300:
            failure = upstream.backend.failure(reply.status, reply.headers, reply.body)
            if upstream.backend.keyed_by_callers:
                failure = of_callers_key(failure)
            raise (
                _unsupported() if _is_unsupported(reply.status, failure) else self._refusal(http.model, holder, failure)
            )
        given = reply.body, holder.endpoint, upstream
        if len(reply.body) <= LARGE:
            return reply.status, self._rewritten(*given)
        async with self.large.rewriting:
            return reply.status, await asyncio.to_thread(self._rewritten, *given)

    async def _fetch(self, call: HttpCall, upstream: Upstream, until_read: AsyncExitStack) -> BufferedReply:
        if call.method != "GET":  # may not be sent twice
            return await upstream.connections.fetch(call, TIMEOUT, ACTION_LIMIT)
        try:
            return await upstream.connections.fetch(call, TIMEOUT, LARGE)
        except TransportError as error:
            if error.failure is not TOO_LARGE:
                raise
        await self.large.enter(self.key, until_read)
        return await upstream.connections.fetch(call, TIMEOUT, LIMIT)

    def _rewritten(self, body: bytes, endpoint: str, upstream: Upstream) -> bytes:
        try:
            sealed = StateAnswer(self.ids, endpoint).whole(mask_error_body(body, upstream.backend.secret))
        except ReplyShapeError:
            raise ApiError(502, "The backend sent something that is not JSON.", type="server_error") from None
        return CachedCountMasker().feed(sealed) if upstream.pool in self.masked_pools else sealed

    def _refusal(self, sealed: str, holder: StateHolder, failure: Failure) -> ApiError:
        """The backend's refusal, with the caller's id in place of the backend's."""
        if failure.status == 404 or holder.id in failure.message:
            return _not_found(sealed)
        if failure.kind in _UNAVAILABLE or failure.retryable:
            return _unreachable(failure)
        return ApiError(failure.status, failure.message, type=failure.type, code=failure.code, logged="refused")


def _is_unsupported(status: int, failure: Failure) -> bool:
    """True for an operation that the backend does not have: vLLM deletes no response."""
    return status in (405, 501) or failure is NOT_SERVED


def _call(http: HttpRequest, holder: StateHolder, upstream: Upstream) -> HttpCall:
    action = http.path.removeprefix("/v1/responses/{id}")
    query = f"?{http.query}" if http.query and _QUERY.fullmatch(http.query) else ""
    path = f"/v1/responses/{quote(holder.id, safe='')}{action}{query}"
    return upstream.backend.stored(http.method, path)


def _not_found(sealed: str) -> ApiError:
    message = f"Response with id '{sealed[:100]}' not found."
    return ApiError(404, message, code="response_not_found", param="response_id", logged="response_not_found")


def _too_large() -> ApiError:
    message = f"The stored response is too large to be read here: at most {LIMIT >> 20} MiB."
    headers = {"x-should-retry": "false"}
    return ApiError(502, message, type="server_error", code="response_too_large", headers=headers)


def _unsupported() -> ApiError:
    code = "unsupported_operation"
    return ApiError(404, NOT_SERVED.message, type="invalid_request_error", code=code, logged=code)


def _unreachable(failure: Failure) -> ApiError:
    message = f"The backend that holds this response does not answer: {failure.message}"
    later = retry_later(failure.retry_after or RETRY)
    return ApiError(503, message, type="server_error", code="unavailable", headers=later, logged=failure.kind.value)
