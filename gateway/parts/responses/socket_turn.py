"""A message on a WebSocket, `response.create`, as the body of a request for a streamed response.

A `previous_response_id` that the socket knows is replaced by the items that led to that response; every other one is
for the backend to know, unless the caller wants nothing stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from gateway.api.api_error import ApiError, bad_request
from gateway.parts.responses.answer_frames import LastResponse
from gateway.parts.responses.kept_turns import KeptTurn
from gateway.strict_json import UNREADABLE, encode, members, too_many_elements

CREATE = "response.create"
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


class UnmatchedOutput(ApiError):
    """A continuation has the output of a call that nobody has made: the chain ends."""


class _Item(msgspec.Struct):
    type: str | None = None
    call_id: str | None = None
    content: Any = None
    summary: Any = None
    encrypted_content: Any = None


_item = msgspec.json.Decoder(_Item)


@dataclass(frozen=True, slots=True)
class SocketTurn:
    """A request, and what a continuation of its response needs. `items`: all input; None: a backend knows a part of it.
    `previous`: the response that it continues. `generates`: false for a turn that only prepares the next one."""

    body: bytes
    items: bytes | None = None
    call_ids: frozenset[str] = frozenset()
    previous: str = ""
    stores: bool = True
    generates: bool = True

    def kept(self, response: LastResponse | None) -> KeptTurn | None:
        """The turn to be kept; None: the response failed, or a backend stores it."""
        if response is None or response.status not in ("completed", "incomplete") or self.items is None:
            return None
        if self.stores and response.store:
            return None
        output = [item for item in response.output if not _is_empty_reasoning(item)]
        calls = _call_ids(output, _CALLS)
        return KeptTurn(response.id, _joined(self.items, *output), self.call_ids | calls)


def read_turn(message: bytes, kept: KeptTurn | None) -> SocketTurn:
    """`kept`: the latest turn of the socket. Raises ApiError."""
    if too_many_elements(message):
        return SocketTurn(message)  # refused by the parser of bodies
    try:
        body = members(message)
    except UNREADABLE:
        raise bad_request("The message is not a JSON object.", logged="no JSON object") from None
    if body.pop("type", None) != CREATE:
        raise bad_request(f"'type': messages of the type {CREATE} are taken, and no others.", "type")
    body.pop("stream_options", None)  # of HTTP
    body["stream"] = True
    previous, stores = body.get("previous_response_id"), body.get("store") is not False
    new = _elements(body.get("input"))
    generates = body.pop("generate", True) is not False
    if not isinstance(previous, str):
        return SocketTurn(encode(body), _joined(*new), _call_ids(new, _CALLS), "", stores, generates)
    if kept is None or kept.response_id != previous:
        if not stores:
            raise _not_found(previous)
        return SocketTurn(encode(body), None, frozenset(), previous, stores, generates)
    calls = kept.call_ids | _call_ids(new, _CALLS)
    _check_outputs(new, calls)
    items = _joined(kept.items, *new)
    del body["previous_response_id"]
    return SocketTurn(encode({**body, "input": Raw(b"[%b]" % items)}), items, calls, previous, stores, generates)


def _check_outputs(new: list[Raw], calls: frozenset[str]) -> None:
    """Raises UnmatchedOutput."""
    if unknown := _call_ids(new, _OUTPUTS) - calls:
        message = f"No tool call found for the output with call_id {min(unknown)[:100]}."
        raise UnmatchedOutput(400, message, param="input", logged="no tool call found for an output")


def _elements(given: Any) -> list[Raw]:
    if isinstance(given, str):
        return [Raw(encode({"type": "message", "role": "user", "content": given}))]
    return given if isinstance(given, list) else []


def _joined(*items: bytes | Raw) -> bytes:
    return b",".join(filter(None, map(bytes, items)))


def _call_ids(items: Iterable[Raw], kinds: tuple[str, ...]) -> frozenset[str]:
    found = (_read(item) for item in items)
    return frozenset(item.call_id for item in found if item.type in kinds and item.call_id is not None)


def _is_empty_reasoning(item: Raw) -> bool:
    """Reasoning that the backend has not shown: it would not know the item again."""
    found = _read(item)
    return found.type == "reasoning" and not (found.content or found.summary or found.encrypted_content)


def _read(item: Raw) -> _Item:
    """An item of no known shape has no members."""
    try:
        return _item.decode(item)
    except (msgspec.DecodeError, RecursionError):
        return _Item()


def _not_found(previous: str) -> ApiError:
    code, message = "previous_response_not_found", f"Previous response with id '{previous[:100]}' not found."
    return ApiError(400, message, code=code, param="previous_response_id", logged=code)
