"""OpenAI's dialect: chat completions and completions, as OpenAI and those compatible with it speak them.

What is sent on is what was parsed: the body's members encoded anew, and within arrays and objects JSON that was
found to be strict, as it was written. Never bytes that somebody else may read differently. Changed are the model, the
stream's usage (the gateway meters by it), the cap on output and whose caches are used; whatever else the caller wrote,
known or not, goes through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from backends import failures
from backends.http.headers import header_lines
from backends.interface import BackendConfig, BackendRequest, Failure, HttpCall, Operation, Tap
from backends.stream.taps import BodyTap, StreamTap

_LIMITS = ("max_completion_tokens", "max_tokens")  # the new name and the old one
_RESERVED = frozenset({"host", "content-length", "transfer-encoding", "connection"})
_encode = msgspec.json.Encoder().encode


class OpenAI:
    """A `Backend`. Subclasses are dialects of this dialect."""

    local: bool = False
    salted: bool = False
    limit_name: str = "max_completion_tokens"  # what bounds a chat's output if the caller did not say
    asks_usage: bool = True  # knows stream_options

    def __init__(self, config: BackendConfig) -> None:
        self.kind = config.kind
        self._secret, self.secret = config.api_key, config.api_key.encode()
        headers = _headers(config)
        self._headers = {
            stream: header_lines({"accept": accept, **headers}.items())
            for stream, accept in ((True, "text/event-stream"), (False, "application/json"))
        }

    # ----------------------------------------------------------------------- the request

    def call(self, forward: BackendRequest) -> HttpCall:
        own, fixed = tuple([field for field in self._own(forward) if field[1]]), self._headers[forward.stream]
        return HttpCall("POST", forward.operation.value, own, _encode(self._body(forward)), fixed)

    def _own(self, forward: BackendRequest) -> tuple[tuple[str, str], ...]:
        """Header fields of this request alone; empty ones are left out."""
        told = ("x-request-id", forward.request_id), ("traceparent", forward.traceparent)
        return (*told, ("tracestate", forward.tracestate)) if forward.tracestate else told

    def _body(self, forward: BackendRequest) -> dict[str, Any]:
        body = {**forward.body, "model": forward.model}
        if not self.salted:
            body.pop("cache_salt", None)  # it knows no such field, and may refuse it
        if forward.stream:
            body["stream"] = True
            options = body.get("stream_options") or {}
            if self.asks_usage and isinstance(options, dict):  # else it is for the server to refuse
                body["stream_options"] = {**options, "include_usage": True}
        elif "stream" in body:
            body["stream"] = False
        if forward.max_tokens is not None:
            self._cap(body, forward.operation, forward.max_tokens)
        return body

    def _cap(self, body: dict[str, Any], operation: Operation, cap: int) -> None:
        """Lower what the caller asked for to `cap`; set it where the caller said nothing, or no number.

        Servers read the text "100000" as the number it looks like.
        """
        asked = [name for name in _LIMITS if body.get(name) is not None]
        for name in asked:
            if type(body[name]) not in (int, float) or body[name] > cap:
                body[name] = cap
        if not asked:
            body[self.limit_name if operation is Operation.CHAT else "max_tokens"] = cap

    # ----------------------------------------------------------------------- the reply

    def tap(self, forward: BackendRequest) -> Tap:
        if not forward.stream:
            return BodyTap(self._secret)
        choices = forward.body.get("n")
        return StreamTap(choices if type(choices) is int else 1, self._secret)

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> Failure:
        return failures.of_reply(status, headers, body, self._secret)

    # ----------------------------------------------------------------------- upkeep

    def probe(self) -> HttpCall | None:
        return None

    def load(self) -> HttpCall | None:
        return None

    def read_load(self, body: bytes) -> Mapping[str, float | None]:
        return {}


def _headers(config: BackendConfig) -> dict[str, str]:
    """What is the same for every call of a pool; configuration has the last word."""
    headers = {
        "content-type": "application/json",
        "accept-encoding": "identity",  # bytes are relayed as they come, and read in passing
        "user-agent": "firsttoken",  # some providers' edges refuse requests without one
    }
    if config.api_key:
        headers["authorization"] = f"Bearer {config.api_key}"
    headers.update({name.lower(): value for name, value in config.headers.items()})
    if reserved := _RESERVED & headers.keys():
        raise ValueError(f"the header '{min(reserved)}' is the gateway's own to write; take it out of headers")
    return headers
