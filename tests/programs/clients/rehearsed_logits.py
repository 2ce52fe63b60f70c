"""A logits processor of vLLM: the rehearsed model speaks through a real engine.

    python -m vllm.entrypoints.openai.api_server ... \\
      --logits-processors tests.programs.clients.rehearsed_logits:RehearsedLogits

A tiny model calls no tool and solves no task of its own will. The processor reads the prompt as rendered by the chat
template of scripts/vllm_models.py, asks the rehearsed model, and leaves one token at every step: the next one of the
answer. The rest is vLLM's own: chat template, prefix cache, scheduling, grammars, parsers of tool calls and reasoning,
events. A token that the request's grammar forbids is not forced. Runs in the environment of vLLM.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from tests.programs.clients.rehearsed_model import TEXT, Answer, Json, answer

NAME = os.environ.get("FIRSTTOKEN_REHEARSED_NAME", "")
MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
TOOLS = "# Tools\n"
THINK = {"role": "system", "content": "Think first."}  # the last message for a caller who wants reasoning
THOUGHT = "</think>\n\n"  # the end of the prompt of a caller who wants none
TURN = "Which turn is this?"


def body_of(prompt: str) -> Json:
    """The chat request of a prompt."""
    messages = [{"role": role, "content": content} for role, content in MESSAGE.findall(prompt)]
    tools: list[Json] = []
    if messages and messages[0]["content"].startswith(TOOLS):
        lines = messages.pop(0)["content"].removeprefix(TOOLS).splitlines()
        tools = [tool if "function" in tool else {"function": tool} for tool in map(json.loads, lines)]
    if messages[-1:] == [THINK]:
        return {"messages": messages[:-1], "tools": tools, "reasoning_effort": "high"}
    return {"messages": messages, "tools": tools}


def said(prompt: str, params: Any) -> str:
    """The whole text for the engine. `params`: SamplingParams of the request."""
    body = body_of(prompt) | enforced(params.structured_outputs)
    if params.thinking_token_budget:
        body["reasoning_effort"] = "high"
    asked = [message["content"] for message in body["messages"] if message["role"] == "user"]
    if not asked:
        return TEXT  # of a completion
    found = Answer(f"turn {len(asked)} of {NAME}") if TURN in asked[-1] else answer(body)
    return written(found, thinks=not prompt.endswith(THOUGHT))


def enforced(outputs: Any) -> Json:
    """Members of the request, from its grammar."""
    if outputs is None:
        return {}
    if outputs.json_object:
        return {"response_format": {"type": "json_object"}}
    if outputs.json:
        schema = json.loads(outputs.json) if isinstance(outputs.json, str) else outputs.json
        return {"tools": [], "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    shape = json.loads(outputs.structural_tag)["format"]
    return {"tool_choice": "required"} if shape["type"] == "tags_with_separator" else {}


def written(found: Answer, thinks: bool) -> str:
    """An answer as a Qwen3 model writes it."""
    calls = "\n".join(
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"
        for call in found.calls
    )
    reasoning = f"<think>{found.reasoning}</think>" if thinks else ""
    return reasoning + (calls or found.text)


class RehearsedLogits(AdapterLogitsProcessor):  # type: ignore[misc]
    """Forces the rehearsed answer on each request."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._tokenizer = AutoTokenizer.from_pretrained(vllm_config.model_config.model)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        tokens: list[int] = []

        def force(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if not tokens:
                tokens.extend(self._tokens(prompt, params))
            wanted = tokens[min(len(output), len(tokens) - 1)]
            if logits[wanted] == -torch.inf:
                return logits
            only = torch.full_like(logits, -torch.inf)
            only[wanted] = 0
            return only

        return force

    def _tokens(self, prompt: list[int], params: Any) -> list[int]:
        text = said(self._tokenizer.decode(prompt, clean_up_tokenization_spaces=False), params)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self._tokenizer.eos_token_id]
