"""Eleven clients by what they send beside the history: members, tools, headers, and how odd they are."""

from __future__ import annotations

import json
from typing import Any

from tests.programs.field.clients import ChatClient, Client, MessagesClient, ResponsesClient
from tests.programs.field.dice import Dice, dice
from tests.programs.field.tools import chat_tools, codex_tools, custom_tool, messages_tools, strict_schema, strict_tools

_BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14"
_ODD = (0, 0, 1)  # of three clients one is odd
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _claude_code(random: Dice) -> Client:
    cache = {"type": "ephemeral"}
    members: dict[str, Any] = {"max_tokens": random.choice([512, 8192, 32000, random.among(512, 1, 64000, 128000)])}
    members["system"] = [{"type": "text", "text": "You are Claude Code.", "cache_control": cache}]
    session = {"device_id": "d" * 64, "account_uuid": "", "session_id": f"{random.getrandbits(64):x}"}
    members["metadata"] = {"user_id": json.dumps(session)}
    kind = random.choice(["adaptive", "enabled", "none", random.among("disabled", "between_tools")])
    if kind == "enabled":
        members["thinking"] = {"type": "enabled", "budget_tokens": max(1024, members["max_tokens"] - 1)}
        members["max_tokens"] = max(members["max_tokens"], 1025)
    elif kind != "none":
        members["thinking"] = {"type": kind}
    if random.random() < 0.5:
        members["output_config"] = {"effort": random.choice(["low", "medium", "high", "xhigh", "max"])}
    if random.random() < 0.3:
        members["context_management"] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    if random.random() < 0.2 and kind in ("none", "disabled"):
        members["temperature"] = 1
    for name, value in (("speed", "fast"), ("service_tier", "auto"), ("diagnostics", {"previous_message_id": None})):
        members |= {name: value} if random.rarely(0.1) else {}
    tools = messages_tools(random, search=random.random() < 0.3)
    options = {"members": members, "reminds": random.random() < 0.4, "searches": random.rarely(0.1)}
    options["odd"] = random.among(*_ODD)
    return MessagesClient("claude-code", random, options, tools, headers={"anthropic-beta": _BETAS})


def _anthropic_sdk(random: Dice) -> Client:
    members: dict[str, Any] = {"max_tokens": random.choice([256, 4096])}
    for name, value in (("temperature", 0.2), ("top_p", 0.9), ("top_k", 40), ("stop_sequences", ["END"])):
        members |= {name: value} if random.random() < 0.2 else {}
    if random.random() < 0.3:
        shape = {"type": "json_schema", "schema": strict_schema(random)}
        members["output_config"] = {"format": shape}
    tools = messages_tools(random, search=False) if random.random() < 0.6 else []
    if tools and random.random() < 0.2:
        members["tool_choice"] = random.choice([{"type": "any"}, {"type": "auto", "disable_parallel_tool_use": True}])
    if random.rarely(0.1):
        members["system"] = [{"type": "text", "text": text} for text in ("You are brief.", " ")]
    options = {"members": members, "odd": random.among(*_ODD)}
    return MessagesClient("anthropic-sdk", random, options, tools, stream=random.random() < 0.5)


def _codex(random: Dice) -> Client:
    effort = random.choice(["low", "medium", "high", "xhigh"])
    members = {
        "instructions": "You are Codex.",
        "tool_choice": "auto",
        "parallel_tool_calls": random.random() < 0.5,
        "reasoning": {"effort": effort, "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    options = {"members": members, "developer": True, "original": random.random() < 0.3}
    options["odd"] = random.among(*_ODD)
    return ResponsesClient("codex", random, options, codex_tools(random))


def _vercel(random: Dice) -> Client:
    members: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"]}
    members["max_output_tokens"] = random.among(4096, 8, 128000)
    if random.random() < 0.5:
        members["reasoning"] = {"effort": random.choice(["low", "medium", "high"]), "summary": "auto"}
    if random.random() < 0.3:
        shape = {"type": "json_schema", "name": "answer", "strict": True, "schema": strict_schema(random)}
        members["text"] = {"format": shape}
    tools = [{"type": "function", **tool["function"]} for tool in chat_tools(random, 3)]
    options = {"members": members, "odd": random.among(*_ODD)}
    return ResponsesClient("vercel-ai", random, options, tools, stream=random.random() < 0.7)


def _chat(shape: str, random: Dice, **more: Any) -> ChatClient:
    """`more`: what distinguishes the client."""
    members: dict[str, Any] = more.pop("members", {})
    options = {"members": members, "odd": random.among(*_ODD), **more.pop("options", {})}
    client = ChatClient(shape, random, options, **more)
    client.history.append({"role": options.get("role", "system"), "content": f"You are {shape}."})
    return client


def _opencode(random: Dice) -> Client:
    members: dict[str, Any] = {"max_tokens": 32000, "temperature": random.choice([0, 0.55, random.among(1, 1.4)])}
    if random.random() < 0.5:
        members["reasoning_effort"] = random.choice(_EFFORTS)
    return _chat("opencode", random, members=members, tools=chat_tools(random, 6), options={"images": True})


def _aider(random: Dice) -> Client:
    members: dict[str, Any] = {"temperature": 0}
    if random.rarely(0.3):
        members |= {"reasoning": {"effort": "high"}, "usage": {"include": True}, "provider": {"sort": "throughput"}}
    return _chat("aider", random, members=members, returns_state=False, options={"reminds": True, "begins": True})


def _cline(random: Dice) -> Client:
    members: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 8192}
    if random.random() < 0.4:
        members["reasoning_effort"] = random.choice(["low", "medium", "high"])
    return _chat("cline", random, members=members, tools=chat_tools(random, 5), options={"images": True})


def _continue(random: Dice) -> Client:
    members: dict[str, Any] = {
        "max_tokens": 4096,
        "stop": random.among(["```", "</s>"], ["\n\n", "`"], [*"abcdef"]),
        "parallel_tool_calls": False,
    }
    tools = chat_tools(random, 3)
    return _chat("continue", random, members=members, tools=tools, returns_state=False)


def _pydantic(random: Dice) -> Client:
    members: dict[str, Any] = {}
    tools = random.among(chat_tools, strict_tools)(random, 3)
    kind = random.choice(["output tool", "schema", "plain"])
    if kind == "output tool":
        members["tool_choice"] = "required"
    elif kind == "schema":
        shape = {"name": "final_result", "schema": strict_schema(random), "strict": True}
        members["response_format"] = {"type": "json_schema", "json_schema": shape}
    return _chat("pydantic-ai", random, members=members, tools=tools, stream=False)


def _langchain(random: Dice) -> Client:
    members: dict[str, Any] = {"temperature": 0.7, "top_p": 1, "n": 1, "frequency_penalty": 0, "presence_penalty": 0}
    if random.random() < 0.3:
        members["response_format"] = {"type": "json_object"}
    for name, value in (("top_logprobs", 20), ("top_k", 20), ("min_p", 0.1), ("repetition_penalty", 1.1)):
        members |= {name: value} if random.rarely(0.1) else {}
    members |= {"logprobs": True} if "top_logprobs" in members else {}
    tools = chat_tools(random, 4) if random.random() < 0.7 else []
    options = {"names": True, "lists_none": random.odd}
    return _chat("langchain", random, members=members, tools=tools, returns_state=False, options=options, stream=False)


def _openai_sdk(random: Dice) -> Client:
    members: dict[str, Any] = {
        "user": "u" * random.choice([8, random.among(64, 100)]),
        "seed": 7,
        "metadata": {"team": "a"},
        "store": False,
    }
    for name, value in (("service_tier", "auto"), ("logit_bias", {}), ("max_completion_tokens", 900)):
        members |= {name: value} if random.random() < 0.4 else {}
    members |= {"max_completion_tokens": random.choice([5, 100_000])} if random.rarely(0.2) else {}
    tools = chat_tools(random, 4) if random.random() < 0.5 else []
    tools += [custom_tool()] if tools and random.rarely(0.3) else []
    options = {"dumps": random.odd, "role": random.among("system", "developer")}
    return _chat("openai-sdk", random, members=members, tools=tools, options=options, stream=random.random() < 0.5)


SHAPES = (_claude_code, _codex, _opencode, _aider, _cline, _continue, _pydantic, _langchain, _vercel, _openai_sdk)
SHAPES_ALL = (*SHAPES, _anthropic_sdk)


def new_client(seed: int, *, odd: bool = True) -> Client:
    """The client of a conversation. `odd`: it may send what few clients do."""
    return SHAPES_ALL[seed % len(SHAPES_ALL)](dice(seed, odd=odd))
