"""Replies of a simulated model: their text, and their bytes in two dialects, vLLM's and the OpenAI API's.

The text is common words, one token each, the same for the same prompt. All engines of a pool therefore agree, and a
peer can continue a broken answer: given its beginning, the rest is the rest.

Differences of the dialects (as seen in vLLM 0.32 and in the OpenAI reference):
- vLLM puts `finish_reason` on the last content chunk, OpenAI on a chunk of its own;
- vLLM adds `metrics` to the usage chunk and to whole replies (--enable-per-request-metrics);
- OpenAI has `usage: null` in every other chunk when usage was requested;
- errors of vLLM carry a CamelCase `type` and an int `code`, OpenAI's a snake_case pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http.client import responses
from math import log
from random import Random
from typing import Any

import msgspec

from lab.engines.engine_events import Refused

# single tokens in the common byte-pair vocabularies, after a space too
_COMMON = """
    the of to and in is it you that for on are with as they be at one have this from by hot word but what some
    out other were all there when up use your how said an each she which do their time if will way about many then
    them write would like so these her long make thing see him two has look more day could go come did number sound
    no most people my over know water than call first who may down side been now find any new work part take get
    place made live where after back little only round man year came show every good me give our under name very
    through just form great think say help low line before turn cause same mean move right boy old too does tell
    set three want air well also play small end put home read hand large add even land here must big high such
    follow act why ask men change went light kind off need house picture try us again animal point mother world
    near build self earth father"""
_WORDS = tuple(_COMMON.split())

_SIGMA = 0.8
_MU = log(150) - _SIGMA**2 / 2  # log-normal lengths, 150 tokens in the mean
_FRAGMENT = 4  # characters of a token in JSON

DONE = b"data: [DONE]\n\n"
GARBAGE = b'data: {"id": "chatcmpl-\n\n'
_VLLM_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
_OPENAI_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}

_encode = msgspec.json.encode


class Function(msgspec.Struct):
    """A function offered to the model, or called: then with `arguments`."""

    name: str
    parameters: dict[str, Any] | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class SimulatedReply:
    """`pieces` are the tokens. A tool call has the function's name and then fragments of the arguments."""

    pieces: tuple[str, ...]
    finish: str  # stop | length | tool_calls
    tool: str | None = None

    @property
    def text(self) -> str:
        """The whole answer; for a tool call, the text in the next turn's prompt."""
        return (self.tool or "") + self.content

    @property
    def content(self) -> str:
        """The text, or the arguments of the tool call."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The requested length in tokens. `limit`: max_tokens, or the rest of the context window."""

    limit: int
    at_least: int = 0
    ignore_eos: bool = False


def write_text(seed: int, spec: OutputSpec, begun: str = "") -> SimulatedReply:
    """The answer to the prompt with this seed, after the words of `begun`."""
    random = Random(seed)
    given = len(begun.split())
    drawn = max(1, round(random.lognormvariate(_MU, _SIGMA)) - given, spec.at_least)
    length = spec.limit if spec.ignore_eos else min(drawn, spec.limit)
    words = [" " + word for word in random.choices(_WORDS, k=given + length)]
    words[0] = words[0].strip()
    return SimulatedReply(tuple(words[given:]), "length" if spec.ignore_eos or drawn > spec.limit else "stop")


def call_tool(function: Function, spec: OutputSpec) -> SimulatedReply:
    """A call of `function` with arguments after the schema. The function's name is the first token."""
    arguments = _encode(_example(function.parameters or {"type": "object"})).decode()
    fragments = [arguments[i : i + _FRAGMENT] for i in range(0, len(arguments), _FRAGMENT)]
    pieces = ("", *fragments)[: spec.limit]
    return SimulatedReply(pieces, "tool_calls" if len(pieces) > len(fragments) else "length", function.name)


def _example(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "string")
    if kind == "object":
        return {name: _example(value) for name, value in schema.get("properties", {}).items()}
    if kind == "array":
        return [_example(schema.get("items", {}))]
    return {"integer": 7, "number": 1.5, "boolean": True, "null": None}.get(kind, "water")


def error_body(error: Refused, vllm: bool) -> dict[str, Any]:
    """The error envelope. An error without a status is 500."""
    status = error.status or 500
    if vllm:
        kind = _VLLM_TYPES.get(status) or responses.get(status, "Error")
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": status}}
    kind = "requests" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    code = error.code or _OPENAI_CODES.get(status)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def error_event(message: str) -> bytes:
    """An error inside a 200 stream."""
    return _event(error_body(Refused(500, message), vllm=True))


@dataclass(kw_only=True)
class ReplyWriter:
    """Writes a reply, as events or whole."""

    reply: SimulatedReply
    id: str
    model: str
    created: int  # s, wall clock
    chat: bool
    vllm: bool
    usage: bool = False  # add a usage chunk
    done: bool = True  # end the stream with [DONE]
    thinking: int = 0  # tokens of a chat's text that are reasoning
    tells_times: bool = True  # of an answer of vLLM: `metrics`

    def __post_init__(self) -> None:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        self._envelope: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            **({} if self.vllm else {"system_fingerprint": "fp_simulated"}),
        }

    def tokens(self, first: int, after: int) -> bytes:
        """The event of the tokens from `first` to before `after`; with the role chunk before the first token, and
        the finish reason after the last. All are reasoning if the first one is."""
        finish = self.reply.finish if after >= len(self.reply.pieces) else None
        role = self._chunk({"role": "assistant", "content": ""}) if self.chat and first == 0 else b""
        if finish is None or self.vllm:
            return role + self._chunk(self._delta(first, after), finish)
        return role + self._chunk(self._delta(first, after)) + self._chunk({} if self.chat else "", finish)

    def ending(self, usage: Mapping[str, Any], metrics: Mapping[str, float]) -> bytes:
        """The end of the stream: the usage chunk, which has no choices, and [DONE]."""
        body = {**self._envelope, "choices": [], "usage": usage}
        if self.vllm and self.tells_times:
            body["metrics"] = metrics
        return (_event(body) if self.usage else b"") + (DONE if self.done else b"")

    def whole(self, usage: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, Any]:
        """The whole reply."""
        reply = self.reply
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reply.finish}
        if not self.chat:
            choice["text"] = reply.text
        elif reply.tool is None:
            choice["message"] = {"role": "assistant", "content": reply.text}
        else:
            choice["message"] = {"role": "assistant", "content": None, "tool_calls": [self._call(reply.content)]}
        body = {**self._envelope, "choices": [choice], "usage": usage}
        if self.chat:
            body["object"] = "chat.completion"
        return {**body, "metrics": metrics} if self.vllm and self.tells_times else body

    def _delta(self, first: int, after: int) -> dict[str, Any] | str:
        piece = "".join(self.reply.pieces[first:after])
        if not self.chat:
            return piece
        if self.reply.tool is None:
            return {"reasoning" if first < self.thinking else "content": piece}
        if first == 0:
            return {"tool_calls": [{"index": 0, **self._call("")}]}
        return {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}

    def _chunk(self, delta: dict[str, Any] | str, finish: str | None = None) -> bytes:
        content = {"delta" if self.chat else "text": delta}
        body = {**self._envelope, "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": finish}]}
        if self.usage and not self.vllm:
            body["usage"] = None
        return _event(body)

    def _call(self, arguments: str) -> dict[str, Any]:
        function = {"name": self.reply.tool, "arguments": arguments}
        call_id = ("chatcmpl-tool-" if self.vllm else "call_") + self.id.rpartition("-")[2]
        return {"id": call_id, "type": "function", "function": function}


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"
