"""Requests about a stored response (retrieve, delete, list the input, cancel), sent to the endpoint with the response.

Such a request is no inference: neither queued nor measured nor retried. A lost endpoint is reported at once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, quote

from backends.failures import NOT_SERVED, TransportError
from backends.interface import Failure, FailureKind, HttpCall
from backends.stream.redaction import CachedCountMasker, mask_secret
from backends.translation.answer import ReplyShapeError
from gateway.api.api_error import ApiError, bad_request, retry_later
from gateway.api.state_answer import StateAnswer
from gateway.api.state_ids import StateHolder, StateIds
from gateway.downstream.http_request import HttpRequest
from gateway.upstream.upstream import Upstream

TIMEOUT = 10.0  # s
RETRY = 1.0  # s until a caller may ask a lost endpoint again
LARGE = 150_000  # bytes of a stored response: more is rewritten in a thread
LIMIT = 64 << 20  # bytes of a stored response, which may hold images

_QUERY = re.compile(r"[!-~]*")
_UNAVAILABLE = (FailureKind.AUTH, FailureKind.MISCONFIGURED, FailureKind.QUOTA)  # nothing that a caller could mend


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """Responses stored for a tenant. `upstreams`: by endpoint id."""

    upstreams: Mapping[str, Upstream]
    masked_pools: frozenset[str]
    ids: StateIds

    async def answer(self, http: HttpRequest, endpoints: Collection[str]) -> tuple[int, bytes]:
        """Status and body. `endpoints`: those open to the caller. Raises ApiError."""
        holder = self.ids.open(http.model, endpoints)
        if holder is None or (upstream := self.upstreams.get(holder.endpoint)) is None:
            raise _not_found(http.model)
        if "stream" in parse_qs(http.query):
            raise bad_request("A stored response cannot be streamed here.", "stream")
        try:
            reply = await upstream.connections.fetch(_call(http, holder, upstream), TIMEOUT, LIMIT)
        except TransportError as error:
            raise _unreachable(error.failure) from None
        if not 200 <= reply.status < 300:
            failure = upstream.backend.failure(reply.status, reply.headers, reply.body)
            raise (
                _unsupported() if _is_unsupported(reply.status, failure) else self._refusal(http.model, holder, failure)
            )
        given = reply.body, holder.endpoint, upstream
        large = len(reply.body) > LARGE
        return reply.status, await asyncio.to_thread(self._rewritten, *given) if large else self._rewritten(*given)

    def _rewritten(self, body: bytes, endpoint: str, upstream: Upstream) -> bytes:
        try:
            sealed = StateAnswer(self.ids, endpoint).whole(mask_secret(body, upstream.backend.secret))
        except ReplyShapeError:
            raise ApiError(502, "The backend sent something that is not JSON.", type="server_error") from None
        return CachedCountMasker().feed(sealed) if endpoint.partition("/")[0] in self.masked_pools else sealed

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


def _unsupported() -> ApiError:
    code = "unsupported_operation"
    return ApiError(404, NOT_SERVED.message, type="invalid_request_error", code=code, logged=code)


def _unreachable(failure: Failure) -> ApiError:
    message = f"The backend that holds this response does not answer: {failure.message}"
    later = retry_later(failure.retry_after or RETRY)
    return ApiError(503, message, type="server_error", code="unavailable", headers=later, logged=failure.kind.value)
