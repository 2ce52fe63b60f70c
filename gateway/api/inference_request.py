"""An inference request as a value, parsed from body and headers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from backends.interface import Operation
from gateway.api.api_error import bad_request
from gateway.api.body import read
from gateway.tokenize.prompt import Prompt
from policies.types import RequestView

_ID_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.:")
_PROCESS = os.urandom(8).hex()  # makes request ids unique across processes and restarts
_sequence = count(1)


@dataclass(slots=True, kw_only=True)
class InferenceRequest(RequestView):
    """A valid request. `body` is forwarded and must not be changed in place; elements of its arrays and members of its
    objects may be `msgspec.Raw`: JSON as it was written, known to be strict."""

    operation: Operation
    body: Mapping[str, Any]
    prompt: Prompt
    model: str
    wants_usage: bool  # the caller requested the usage chunk
    traceparent: str
    request_id: str
    size: int  # bytes of body


def parse(
    operation: Operation,
    raw: bytes,
    headers: Mapping[str, str],
    arrival: float,
    request_id: str,
    wanted: frozenset[str] = frozenset(),
) -> InferenceRequest:
    """Raises ApiError (400) with the name of the field. `wanted`: headers read by conditions of routes."""
    parsed = read(operation, raw, headers.get("authorization"))
    parameters = parsed.parameters
    return InferenceRequest(
        operation=operation,
        body=parsed.members,
        prompt=parsed.prompt,
        model=parameters.model,
        stream=parameters.stream,
        wants_usage=parameters.wants_usage,
        max_tokens=parameters.max_tokens,
        tools=parameters.tools,
        json_schema=parameters.json_schema,
        user_turns=parsed.user_turns,
        images=parsed.images,
        priority=_integer(headers, "x-priority"),
        traceparent=headers.get("traceparent", "")[:128],
        session=headers.get("x-session-id", "")[:256],
        ttft_budget=_budget(headers, "x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"),
        tpot_budget=_budget(headers, "x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"),
        headers={name: headers[name] for name in wanted if name in headers},
        arrival=arrival,
        request_id=request_id,
        size=len(raw),
    )


def _integer(headers: Mapping[str, str], name: str) -> int:
    value = headers.get(name)
    if value is None:
        return 0
    try:
        return int(value)
    except ValueError:
        raise bad_request(f"The header {name} must be an integer.", name) from None


def _budget(headers: Mapping[str, str], *names: str) -> float | None:
    for name in names:
        if (value := headers.get(name)) is not None:
            try:
                millis = float(value)
            except ValueError:
                millis = -1.0
            if not 0 < millis < 1e9:
                raise bad_request(f"The header {name} must be a positive number of milliseconds.", name)
            return millis / 1e3
    return None


def request_id_of(headers: Mapping[str, str]) -> str:
    """The caller's own id if short and plain (ids are logged and forwarded); otherwise a new id."""
    given = headers.get("x-request-id", "")
    if given and len(given) <= 128 and _ID_CHARACTERS.issuperset(given):
        return given
    return f"req_{_PROCESS}{next(_sequence):08x}"
