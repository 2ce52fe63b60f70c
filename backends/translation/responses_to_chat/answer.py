"""Turns chat completions into replies and events of OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends import failures
from backends.interface import Failure
from backends.stream.sse import ServerSentEvent
from backends.translation.reply_members import as_object, as_objects, decoded
from backends.translation.responses_to_chat.response_builder import ResponseBuilder
from backends.translation.translation import NO_CONTEXT, AnswerContext, EventTranslator, Json


class ResponsesFromChatStream(EventTranslator):
    """Stream of a chat completion, for a caller of Responses."""

    def __init__(self, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> None:
        super().__init__()
        self._builder = ResponseBuilder(body, context)
        self._reason = ""  # why the answer has ended
        self._usage: Any = None
        self._service_tier: Any = None

    def translate(self, event: ServerSentEvent) -> bytes:
        if self._builder.ended:
            return b""
        if event.data.startswith(b"[DONE]"):
            return self._complete()
        chunk = decoded(event.data)
        if chunk.get("error"):
            return self.error(failures.of_event(chunk["error"]))
        if not self._builder.response:
            self._builder.begin(chunk.get("id"), chunk.get("created"), chunk.get("model"))
        self._usage = chunk.get("usage") or self._usage
        self._service_tier = chunk.get("service_tier") or self._service_tier
        for choice in as_objects(chunk.get("choices")):
            self._builder.add(as_object(choice.get("delta")), choice.get("logprobs"))
            self._reason = str(choice.get("finish_reason") or self._reason)
        return self._builder.take()

    def close(self) -> bytes:
        """End the stream. Without a finish_reason it is incomplete, and ends by `error`."""
        rest = super().close()
        return rest + self._complete() if self._reason and not self._builder.ended else rest

    def error(self, failure: Failure) -> bytes:
        if not self._builder.ended:
            self._builder.fail(failure)
        return self._builder.take()

    def _complete(self) -> bytes:
        if not self._builder.response:
            self._builder.begin(None, None, None)
        self._builder.finish(self._reason, self._usage, self._service_tier)
        return self._builder.take()


def response_from_chat(reply: Json, body: Mapping[str, Any], context: AnswerContext = NO_CONTEXT) -> Json:
    """The `response` object for a whole chat completion."""
    builder = ResponseBuilder(body, context)
    builder.begin(reply.get("id"), reply.get("created"), reply.get("model"))
    reason = ""
    for choice in as_objects(reply.get("choices")):
        builder.add(as_object(choice.get("message")), choice.get("logprobs"))
        reason = str(choice.get("finish_reason") or reason)
    builder.finish(reason, reply.get("usage"), reply.get("service_tier"))
    return builder.response
