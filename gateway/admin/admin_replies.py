"""Bodies of requests, and replies, of the admin port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from aiohttp import web

from gateway.api.api_error import ApiError
from gateway.downstream.http_request import framing_error

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        response = json_response(error.status, error.body(), error.headers)
        if error.close:
            response.force_close()
        return response


def json_response(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> web.Response:
    response = web.Response(status=status, body=body, headers=headers)
    response.content_type = "application/json"
    response.headers["server"] = "firsttoken"
    return response


def lowercase_headers(http: web.Request) -> dict[str, str]:
    return {name.lower(): value for name, value in http.headers.items()}


async def read_body(http: web.Request, limit: int) -> bytes:
    """The body, of `limit` bytes at most. Raises ApiError."""
    if (error := framing_error(lowercase_headers(http), True, limit)) is not None:
        raise error
    body = bytearray()
    async for part in http.content.iter_any():
        body += part
        if len(body) > limit:
            raise ApiError(413, f"The body is larger than {limit} bytes.", close=True)
    return bytes(body)


def accepts_gzip(codings: Iterable[str]) -> bool:
    """`codings`: values of Accept-Encoding (RFC 9110, section 12.5.3)."""
    weights = dict(coding.partition(";q=")[::2] for coding in ",".join(codings).replace(" ", "").lower().split(","))
    return "gzip" in weights and (weights["gzip"] == "" or weights["gzip"].strip("0.") != "")
