"""Anthropic's message threads: the API keeps a conversation, and a request brings only what is new
(platform.claude.com/docs, beta message-threads-2026-08-12).

- `thread: {"type": "create"}` comes with the whole conversation. `{"type": "continue", "previous_message_id": ...}`
  comes with the new messages alone: a server that keeps no threads, or another account, would answer without the rest.
- So a route takes threads only if each of its pools keeps them. Elsewhere it refuses, in words after which Anthropic's
  SDKs and Claude Code send the whole conversation without a thread.
- The id of a message in a thread names the endpoint, sealed (`state_ids`): a thread goes on there, and only for the API
  key that began it. After an id that is unknown, the SDKs begin the thread anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from backends.interface import Operation
from gateway.api.api_error import ApiError
from gateway.api.inference_request import InferenceRequest
from gateway.parts.responses.state_answer import SealedAnswer
from gateway.parts.responses.state_ids import StateIds

NOT_FOUND, UNSUPPORTED = "thread_not_found", "thread_unsupported_request"


def has_thread(request: InferenceRequest) -> bool:
    return request.operation is Operation.MESSAGES and request.body.get("thread") is not None


def open_thread(body: Mapping[str, Any], ids: StateIds, endpoints: Collection[str]) -> tuple[Mapping[str, Any], str]:
    """Return the body with the API's own id of the thread's last message, and the endpoint with the thread; empty: the
    thread is new. Raises ApiError (404) for an unknown id."""
    thread = body["thread"]
    previous = thread.get("previous_message_id") if isinstance(thread, Mapping) else None
    if not isinstance(previous, str):
        return body, ""
    holder = ids.open(previous, endpoints)
    if holder is None:
        raise not_found()
    return {**body, "thread": {**thread, "previous_message_id": holder.id}}, holder.endpoint


def not_found() -> ApiError:
    message = "No thread is known here for 'previous_message_id': send the whole conversation, with a new thread."
    return ApiError(404, message, code=NOT_FOUND, param="thread.previous_message_id")


def unsupported() -> ApiError:
    message = "This model keeps no threads: send the whole conversation, without 'thread'."
    return ApiError(400, message, code=UNSUPPORTED, param="thread")


class ThreadAnswer(SealedAnswer):
    """A message of a thread: its id is sealed, all else stays as it is."""

    marks = (b'"message_start"',)  # the event with the id

    def seal_reply(self, reply: dict[str, Any]) -> None:
        self.seal(reply, "id")

    def seal_event(self, event: dict[str, Any]) -> None:
        if isinstance(message := event.get("message"), dict):
            self.seal(message, "id")
