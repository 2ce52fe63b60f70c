"""Anthropic's Messages API (platform.claude.com/docs, API reference, November 2026).

The version of the API is that of the caller where the caller speaks Messages, for it says what a body may hold; else
2023-06-01, which still knows `temperature` and `top_p`. `headers: {anthropic-version: ...}` of the pool overrides both.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from backends.interface import BackendConfig, BackendRequest, Failure, FailureKind, HttpCall, Operation
from backends.openai import OpenAI

VERSION = "2023-06-01"
MAX_TOKENS = 32_000  # where neither the caller nor the route limits the output: Anthropic asks for a limit
_CALLERS = ("anthropic-version", "anthropic-beta")  # headers of the caller that are sent on
_LIMITS = ("requests", "tokens", "input-tokens", "output-tokens")


class Anthropic(OpenAI):
    """Anthropic's API, by an API key."""

    native = frozenset({Operation.MESSAGES, Operation.COUNT_TOKENS})

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._configured = {name.lower() for name in config.headers}
        if "authorization" not in self._configured:
            self._headers.pop("authorization", None)
        if config.api_key:
            self._headers.setdefault("x-api-key", config.api_key)
        self._headers.setdefault("anthropic-version", VERSION)

    def call(self, forward: BackendRequest) -> HttpCall:
        call = super().call(forward)
        callers = {name: forward.headers[name] for name in _CALLERS if name in forward.headers}
        own = {name: value for name, value in callers.items() if name not in self._configured}
        return replace(call, headers={**call.headers, **own}) if own else call

    def _body(self, forward: BackendRequest) -> dict[str, Any]:
        body = super()._body(forward)
        if forward.operation is Operation.MESSAGES:
            body.setdefault("max_tokens", MAX_TOKENS)
        return body

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> Failure:
        failure = super().failure(status, headers, body)
        if failure.kind is FailureKind.RATE_LIMITED and failure.retry_after is None:
            return replace(failure, retry_after=_until_reset(headers))
        return failure


def _until_reset(headers: Mapping[str, str]) -> float | None:
    """Seconds until the last of the used-up limits is full again; None: not told. Times are RFC 3339, compared with
    the reply's own Date."""
    waits = []
    for limit in _LIMITS:
        if headers.get(f"anthropic-ratelimit-{limit}-remaining") == "0":
            with suppress(ValueError, TypeError):
                reset = datetime.fromisoformat(headers.get(f"anthropic-ratelimit-{limit}-reset", ""))
                waits.append((reset - parsedate_to_datetime(headers.get("date", ""))).total_seconds())
    return max(max(waits), 0.0) if waits else None
