"""Dialects of callers by operation: reading a body, and writing an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from backends.interface import Failure, Operation
from backends.translation.messages_to_chat.answer import error_event as messages_error_event
from gateway.api import messages_dialect, pooling_dialect, responses_dialect
from gateway.api.api_error import ApiError, envelope
from gateway.api.parsed_body import ParsedBody
from gateway.strict_json import encode

READERS: Mapping[Operation, Callable[[Operation, bytes], ParsedBody]] = {
    **dict.fromkeys(responses_dialect.OPERATIONS, responses_dialect.read),
    Operation.MESSAGES: messages_dialect.read,
    Operation.COUNT_TOKENS: messages_dialect.read,
    Operation.EMBEDDINGS: pooling_dialect.read,
    Operation.RERANK: pooling_dialect.read,
    Operation.SCORE: pooling_dialect.read,
    Operation.TOKENIZE: pooling_dialect.read,
}


def error_reply(error: ApiError, path: str, headers: Mapping[str, str], request_id: str = "") -> tuple[int, bytes]:
    """Status and body of an error in the caller's dialect."""
    if messages_dialect.speaks(path, headers):
        return messages_dialect.status_of(error), messages_dialect.error_body(error, request_id)
    return error.status, error.body()


def error_event(failure: Failure, path: str) -> bytes:
    """The event that ends a stream by an error, in the caller's dialect."""
    if path == Operation.MESSAGES.value:
        return messages_error_event(failure)
    if path == Operation.RESPONSES.value:
        return responses_dialect.error_event(failure)
    return b"data: " + encode(envelope(failure.message, failure.type, failure.code, None)) + b"\n\n"
