"""From a request body to an order: what is to be computed, and what will be answered.

Whatever vLLM or an API would refuse is refused here, as `Rejected`, in the words of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.simulated.bodies import Body, ChatBody, CompletionBody, Function, StreamOptions
from backends.simulated.error_replies import Rejected
from backends.simulated.events import EngineRequest, RequestId
from backends.simulated.profiles import ApiProfile, Profile
from backends.simulated.reply import OutputSpec, SimulatedReply, call_tool, write_text
from backends.simulated.simulated_prompt import Encode, PromptEncoder, SimulatedPrompt, hash_blocks


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One request, understood."""

    request: EngineRequest
    reply: SimulatedReply
    stream: bool
    usage: bool  # stream_options.include_usage


class RequestParser:
    """Takes orders for one model on one machine."""

    def __init__(self, profile: Profile, model: str, encode: Encode) -> None:
        self._profile = profile
        self._model = model
        self._encoder = PromptEncoder(encode)
        self._vllm = not isinstance(profile, ApiProfile)

    def take(self, request_id: RequestId, body: ChatBody | CompletionBody) -> ParsedRequest:
        """The order in `body`, or Rejected."""
        if body.model not in (None, self._model):
            raise Rejected(404, f"The model `{body.model}` does not exist.", "model")
        if body.n not in (None, 1):
            raise Rejected(400, "n must be 1: the simulated engine gives one answer", "n")
        prompt = self.prompt(body)
        wish = self._wish(body, len(prompt.tokens))
        function = _forced_tool(body) if isinstance(body, ChatBody) else None
        reply = call_tool(function, wish) if function is not None else write_text(prompt.seed, wish, prompt.begun)
        usage = (body.stream_options or StreamOptions()).include_usage
        return ParsedRequest(
            self._request(request_id, prompt, reply, body.cache_salt or ""), reply, bool(body.stream), usage
        )

    def prompt(self, body: ChatBody | CompletionBody) -> SimulatedPrompt:
        """The tokens that the model would see."""
        return self._encoder.chat(body) if isinstance(body, ChatBody) else self._encoder.completion(body.prompt)

    def _wish(self, body: Body, prompt_tokens: int) -> OutputSpec:
        asked = body.max_tokens
        if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
            asked = body.max_completion_tokens
        room = self._profile.max_model_len - prompt_tokens
        if room < (asked or 1):
            raise self._overflow(prompt_tokens, asked or 0)
        return OutputSpec(asked or room, body.min_tokens or 0, bool(body.ignore_eos) and self._vllm)

    def _overflow(self, prompt_tokens: int, asked: int) -> Rejected:
        start = f"This model's maximum context length is {self._profile.max_model_len} tokens. However, "
        if self._vllm:
            return Rejected(
                400,
                f"{start}you requested {asked} output tokens and your prompt contains {prompt_tokens} input tokens, "
                f"for a total of {prompt_tokens + asked} tokens. Please reduce the length of the input prompt or the "
                "number of requested output tokens.",
                "input_tokens",
            )
        message = f"{start}your messages resulted in {prompt_tokens + asked} tokens. Please reduce their length."
        return Rejected(400, message, "messages", "context_length_exceeded")

    def _request(
        self, request_id: RequestId, prompt: SimulatedPrompt, reply: SimulatedReply, salt: str
    ) -> EngineRequest:
        """With hashes through the answer, encoded as the next turn of the conversation will encode it."""
        tokens, length = prompt.tokens, len(reply.pieces)
        if not self._vllm:
            return EngineRequest(request_id, len(tokens), length)
        begun = len(self._encoder.text(prompt.begun)) if prompt.begun else 0
        answer = self._encoder.text(prompt.begun + reply.text)[begun:]
        hashes = hash_blocks([*tokens, *answer], self._profile.block_size, salt)
        whole = len(tokens) // self._profile.block_size
        return EngineRequest(request_id, len(tokens), length, hashes[:whole], hashes[whole:])


def _forced_tool(body: ChatBody) -> Function | None:
    """The function that `tool_choice` makes the model call: a named one, or the first where one is required."""
    functions, choice = [tool.function for tool in body.tools or ()], body.tool_choice
    if isinstance(choice, str) or choice is None:
        return functions[0] if choice == "required" and functions else None
    for function in functions:
        if function.name == choice.function.name:
            return function
    raise Rejected(400, f"tool_choice names '{choice.function.name}', which is not among the tools", "tool_choice")
