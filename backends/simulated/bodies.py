"""The request bodies that a simulated server understands, validated; what it does not know it ignores."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from backends.simulated.error_replies import Rejected

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Function(msgspec.Struct):
    """A function that may be called; `arguments` where it was."""

    name: str
    parameters: dict[str, Any] | None = None
    arguments: str = ""


class Tool(msgspec.Struct):
    """One of `tools`, of a message's `tool_calls`, or a `tool_choice`."""

    function: Function


class Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Tool] | None = None

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The content as a list of parts, whichever way it was written."""
        if isinstance(self.content, str):
            return [{"type": "text", "text": self.content}]
        return self.content or []

    @property
    def text(self) -> str:
        return "".join(str(part.get("text", "")) for part in self.parts)


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Body(msgspec.Struct, kw_only=True):
    """What both operations take."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = False
    cache_salt: str | None = None
    n: int | None = 1


class ChatBody(Body, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    tools: list[Tool] | None = None
    tool_choice: str | Tool | None = None
    continue_final_message: bool | None = False


class CompletionBody(Body, kw_only=True):
    prompt: Annotated[str, msgspec.Meta(min_length=1)] | Annotated[list[int], msgspec.Meta(min_length=1)]


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Rejected(400, f"the body is not a JSON object: {error}") from None


def understand(body: dict[str, Any], kind: type[ChatBody | CompletionBody]) -> ChatBody | CompletionBody:
    """The body, validated."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise Rejected(400, str(error)) from None
