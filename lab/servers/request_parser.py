"""From a request body to an engine request and a reply. Raises Refused for a body refused by vLLM or by an API.

The chat template is ChatML-like. A message is `<start> role newline content <end>`: the content and 4 tokens; the
prompt ends with the header of the answer: 3 tokens. Messages are encoded separately, and encodings are cached: the
cost of a conversation grows with new text. Tools are a message in front. A part other than text (an image) counts as
256 tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any
from zlib import crc32

import msgspec

from backends.server_profiles import ApiProfile, Profile
from lab.engines.engine_events import EngineRequest, Refused, RequestId
from lab.servers.reply import Function, OutputSpec, SimulatedReply, call_tool, write_text

Encode = Callable[[str], Sequence[int]]

_START, _END, _NEWLINE = 1_000_000, 1_000_001, 1_000_002  # beyond any vocabulary in use
_ROLES = {"system": 1_000_010, "developer": 1_000_011, "user": 1_000_012, "assistant": 1_000_013, "tool": 1_000_014}
_PART_TOKENS = 256
_CACHED_TOKENS = 1_000_000  # of cached encodings, about 40 MB

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Tool(msgspec.Struct):
    """Of `tools`, `tool_calls` or `tool_choice`."""

    function: Function


class Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Tool] | None = None

    @property
    def parts(self) -> list[dict[str, Any]]:
        return [{"text": self.content}] if isinstance(self.content, str) else self.content or []

    @property
    def text(self) -> str:
        return "".join(str(part.get("text", "")) for part in self.parts)


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Body(msgspec.Struct, kw_only=True):
    """The fields of both operations; unknown fields are ignored."""

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


@dataclass(frozen=True, slots=True)
class SimulatedPrompt:
    """`begun`: beginning of the answer, sent by the caller (`continue_final_message`); `seed`: of the whole answer."""

    tokens: list[int]
    seed: int
    begun: str = ""


class PromptEncoder:
    """Renders prompts through the injected `encode`."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._cache: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._cached_tokens = 0

    def text(self, text: str) -> tuple[int, ...]:
        """The tokens of `text`, cached."""
        cache = self._cache
        tokens = cache.get(text)
        if tokens is not None:
            cache.move_to_end(text)
            return tokens
        cache[text] = tokens = tuple(self._encode(text))
        self._cached_tokens += len(tokens)
        while self._cached_tokens > _CACHED_TOKENS and len(cache) > 1:
            self._cached_tokens -= len(cache.popitem(last=False)[1])
        return tokens

    def prompt(self, body: ChatBody | CompletionBody) -> SimulatedPrompt:
        if isinstance(body, CompletionBody):
            tokens = list(self.text(body.prompt) if isinstance(body.prompt, str) else body.prompt)
            return SimulatedPrompt(tokens, hash(tuple(tokens)))
        last = body.messages[-1]
        continued = bool(body.continue_final_message) and last.role == "assistant"
        tokens = []
        if body.tools:
            tokens += self._message("system", self.text(msgspec.json.encode(body.tools).decode()))
        for message in body.messages[:-1] if continued else body.messages:
            tokens += self._message(message.role, self._content(message))
        tokens += (_START, _ROLES["assistant"], _NEWLINE)
        seed = hash(tuple(tokens))
        if continued:
            return SimulatedPrompt(tokens + self._content(last), seed, last.text)
        return SimulatedPrompt(tokens, seed)

    def _message(self, role: str, content: Sequence[int]) -> tuple[int, ...]:
        return (_START, _ROLES.get(role, _ROLES["user"]), _NEWLINE, *content, _END)

    def _content(self, message: Message) -> list[int]:
        tokens: list[int] = []
        for part in message.parts:
            if isinstance(part.get("text"), str):
                tokens += self.text(part["text"])
            else:
                tokens += [crc32(msgspec.json.encode(part))] * _PART_TOKENS
        for call in message.tool_calls or ():
            tokens += self.text(call.function.name + call.function.arguments)
        return tokens


def hash_blocks(tokens: Sequence[int], size: int, salt: str = "") -> list[int]:
    """Chained hashes of the full blocks, as in vllm/v1/core/kv_cache_utils.py: hash(parent, tokens of the block); the
    first parent stands for the `cache_salt`. Equal in every process: only integers are hashed."""
    parent = int.from_bytes(blake2b(salt.encode(), digest_size=7).digest())
    hashes = []
    for start in range(0, len(tokens) - size + 1, size):
        parent = hash((parent, tuple(tokens[start : start + size])))
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    request: EngineRequest
    reply: SimulatedReply
    stream: bool
    usage: bool  # stream_options.include_usage


class RequestParser:
    """Parses requests to a model on a machine."""

    def __init__(self, profile: Profile, model: str, encode: Encode, adapters: Collection[str] = ()) -> None:
        self._profile = profile
        self._model = model
        self._adapters = adapters
        self.encoder = PromptEncoder(encode)
        self._vllm = not isinstance(profile, ApiProfile)

    def parse(self, request_id: RequestId, body: ChatBody | CompletionBody) -> ParsedRequest:
        """Raises Refused."""
        adapter = body.model if body.model in self._adapters else ""
        if not adapter and body.model not in (None, self._model):
            raise Refused(404, f"The model `{body.model}` does not exist.", "model")
        if body.n not in (None, 1):
            raise Refused(400, "n must be 1: the simulated engine gives one answer", "n")
        prompt = self.encoder.prompt(body)
        output = self._output(body, len(prompt.tokens))
        function = _forced_tool(body) if isinstance(body, ChatBody) else None
        reply = call_tool(function, output) if function is not None else write_text(prompt.seed, output, prompt.begun)
        request = self._request(request_id, prompt, reply, body.cache_salt or "", adapter or "")
        usage = body.stream_options is not None and body.stream_options.include_usage
        return ParsedRequest(request, reply, bool(body.stream), usage)

    def _output(self, body: Body, prompt_tokens: int) -> OutputSpec:
        asked = body.max_tokens
        if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
            asked = body.max_completion_tokens
        room = self._profile.max_model_len - prompt_tokens
        if room < (asked or 1):
            raise self._overflow(prompt_tokens, asked or 0)
        return OutputSpec(asked or room, body.min_tokens or 0, bool(body.ignore_eos) and self._vllm)

    def _overflow(self, prompt_tokens: int, asked: int) -> Refused:
        start = f"This model's maximum context length is {self._profile.max_model_len} tokens. However, "
        if self._vllm:
            message = (
                f"{start}you requested {asked} output tokens and your prompt contains {prompt_tokens} input tokens, "
                f"for a total of {prompt_tokens + asked} tokens. Please reduce the length of the input prompt or the "
                "number of requested output tokens."
            )
            return Refused(400, message, "input_tokens")
        message = f"{start}your messages resulted in {prompt_tokens + asked} tokens. Please reduce their length."
        return Refused(400, message, "messages", "context_length_exceeded")

    def _request(
        self, request_id: RequestId, prompt: SimulatedPrompt, reply: SimulatedReply, salt: str, adapter: str
    ) -> EngineRequest:
        """With hashes through the answer, encoded as in the next turn of the conversation."""
        tokens, length = prompt.tokens, len(reply.pieces)
        if not self._vllm:
            return EngineRequest(request_id, len(tokens), length)
        begun = len(self.encoder.text(prompt.begun)) if prompt.begun else 0
        answer = self.encoder.text(prompt.begun + reply.text)[begun:]
        salt = f"{salt}\0{adapter}" if adapter else salt
        hashes = hash_blocks([*tokens, *answer], self._profile.block_size, salt)
        whole = len(tokens) // self._profile.block_size
        return EngineRequest(request_id, len(tokens), length, hashes[:whole], hashes[whole:], adapter)


def _forced_tool(body: ChatBody) -> Function | None:
    """The function forced by `tool_choice`: a named function, or the first if any is required."""
    functions, choice = [tool.function for tool in body.tools or ()], body.tool_choice
    if isinstance(choice, str) or choice is None:
        return functions[0] if choice == "required" and functions else None
    for function in functions:
        if function.name == choice.function.name:
            return function
    raise Refused(400, f"tool_choice names '{choice.function.name}', which is not among the tools", "tool_choice")
