"""Replies of the admin port, which is an ordinary aiohttp application."""

from __future__ import annotations

from aiohttp import web

from gateway.api.api_error import ApiError


def reply(refusal: ApiError) -> web.Response:
    """An error as a response; it closes the connection where the refusal says so."""
    return respond(refusal.status, refusal.body(), refusal.headers, close=refusal.close)


def respond(status: int, body: bytes, headers: dict[str, str] | None = None, *, close: bool = False) -> web.Response:
    response = web.Response(status=status, body=body, headers=headers)
    response.content_type = "application/json"
    response.headers["server"] = "firsttoken"
    if close:
        response.force_close()
    return response
