"""Ten clients: requests in the shape that each sends, and the history that each keeps of the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from backends.interface import Operation
from tests.programs.field.tools import chat_tools, codex_tools, messages_tools, strict_schema

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
_DATA_URL = f"data:image/png;base64,{PIXEL}"
_BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14"
_MINE = ("role", "content", "tool_calls")


@dataclass
class Client:
    """`history`: in the caller's own dialect. `returns_state`: all that an answer held comes back."""

    shape: str
    random: Random
    options: dict[str, Any] = field(default_factory=dict)
    tools: list[Any] = field(default_factory=list)
    history: list[Any] = field(default_factory=list)
    stream: bool = True
    returns_state: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    waiting: list[Any] = field(default_factory=list)  # calls without a result

    operation = Operation.CHAT

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def proceed(self, number: int) -> None:
        """Add the results of open calls, or what the user says next."""
        if self.waiting:
            self.add_results()
        if not self.history or not self.last_is_open():
            self.add_user(number)

    def last_is_open(self) -> bool:
        return False

    def add_results(self) -> None: ...
    def add_user(self, number: int) -> None: ...
    def body(self) -> dict[str, Any]:
        raise NotImplementedError

    def take(self, answer: Mapping[str, Any]) -> None: ...

    @property
    def names(self) -> set[str]:
        raise NotImplementedError


class ChatClient(Client):
    """aider, Cline, Continue, opencode, pydantic-ai, LangChain, Vercel's SDK and OpenAI's own."""

    def last_is_open(self) -> bool:
        return bool(self.history[-1]["role"] == "tool")

    def add_user(self, number: int) -> None:
        content: Any = f"Step {number}: please go on."
        if self.options.get("images") and self.chance(0.3):
            content = [{"type": "text", "text": content}, {"type": "image_url", "image_url": {"url": _DATA_URL}}]
        turn = {"role": "user", "content": content}
        if self.options.get("names"):
            turn["name"] = "alice"
        if self.options.get("reminds") and number and self.chance(0.4):
            self.history.append({"role": "system", "content": "Reminder: keep to the format."})
        self.history.append(turn)

    def add_results(self) -> None:
        for call in self.waiting:
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": f"done {call['id'][:4]}"})
            if self.options.get("names"):
                self.history[-1]["name"] = (call.get("function") or call.get("custom"))["name"]
        self.waiting = []

    def body(self) -> dict[str, Any]:
        body = {"messages": list(self.history), **self.options["members"]}
        if self.tools:
            body["tools"] = self.tools
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def take(self, answer: Mapping[str, Any]) -> None:
        message = {name: value for name, value in answer.items() if value is not None or name == "content"}
        if not self.returns_state:
            message = {name: message[name] for name in _MINE if name in message}
            for call in message.get("tool_calls") or ():
                call.pop("extra_content", None)
                call.pop("index", None)
        for call in message.get("tool_calls") or ():
            call.setdefault("id", f"call_{self.random.getrandbits(64):016x}")
        self.history.append(message)
        self.waiting = list(message.get("tool_calls") or ())

    @property
    def names(self) -> set[str]:
        return {tool[tool["type"]]["name"] for tool in self.tools}


class MessagesClient(Client):
    """Claude Code and Anthropic's own SDK."""

    operation = Operation.MESSAGES

    def last_is_open(self) -> bool:
        content = self.history[-1]["content"]
        return (
            self.history[-1]["role"] != "assistant"
            and isinstance(content, list)
            and content[0]["type"] == "tool_result"
        )

    def add_user(self, number: int) -> None:
        blocks: list[Any] = [{"type": "text", "text": f"Step {number}: please go on."}]
        if self.chance(0.2):
            blocks.append({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}})
        self.history.append({"role": "user", "content": blocks if self.chance(0.6) else blocks[0]["text"]})
        if self.options.get("reminds") and number and self.chance(0.3):
            self.history.append({"role": "system", "content": "The working folder has changed."})

    def add_results(self) -> None:
        blocks: list[Any] = []
        for call in self.waiting:
            content: Any = f"done {call['id'][:4]}"
            if call["name"] == "ToolSearch":
                content = [{"type": "tool_reference", "tool_name": self.tools[-1]["name"]}]
            elif self.chance(0.15):
                image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
                content = [{"type": "text", "text": content}, image]
            blocks.append({"type": "tool_result", "tool_use_id": call["id"], "content": content})
            if self.chance(0.1):
                blocks[-1] |= {"is_error": True, "content": "it failed"}
        self.history.append({"role": "user", "content": blocks})
        self.waiting = []

    def body(self) -> dict[str, Any]:
        body = {"messages": list(self.history), "stream": self.stream, **self.options["members"]}
        return {**body, "tools": self.tools} if self.tools else body

    def take(self, answer: Mapping[str, Any]) -> None:
        content = [block for block in answer["content"] if block.get("type") != "text" or block["text"]]
        self.history.append({"role": "assistant", "content": content or [{"type": "text", "text": "..."}]})
        self.waiting = [block for block in content if block["type"] == "tool_use"]

    @property
    def names(self) -> set[str]:
        return {tool["name"] for tool in self.tools}


class ResponsesClient(Client):
    """Codex and Vercel's SDK."""

    operation = Operation.RESPONSES

    def last_is_open(self) -> bool:
        return str(self.history[-1].get("type")).endswith("_output")

    def add_user(self, number: int) -> None:
        if not self.history and self.options.get("developer"):
            text = {"type": "input_text", "text": "<permissions>read only</permissions>"}
            self.history.append({"type": "message", "role": "developer", "content": [text]})
        parts: list[Any] = [{"type": "input_text", "text": f"Step {number}: please go on."}]
        if self.chance(0.2):
            detail = "original" if self.options.get("original") else "auto"
            parts.append({"type": "input_image", "image_url": _DATA_URL, "detail": detail})
        self.history.append({"type": "message", "role": "user", "content": parts})

    def add_results(self) -> None:
        for call in self.waiting:
            kind = "custom_tool_call_output" if call["type"] == "custom_tool_call" else "function_call_output"
            self.history.append({"type": kind, "call_id": call["call_id"], "output": f"done {call['call_id'][:4]}"})
        self.waiting = []

    def body(self) -> dict[str, Any]:
        body = {"input": list(self.history), "stream": self.stream, **self.options["members"]}
        return {**body, "tools": self.tools} if self.tools else body

    def take(self, answer: Mapping[str, Any]) -> None:
        for item in answer["output"]:
            kept = dict(item)
            if self.shape == "codex" and item["type"] != "reasoning":
                kept.pop("id", None)
                kept.pop("status", None)
            self.history.append(kept)
        self.waiting = [item for item in answer["output"] if item["type"] in ("function_call", "custom_tool_call")]

    @property
    def names(self) -> set[str]:
        spaces = [tool for tool in self.tools if tool["type"] == "namespace"]
        return {tool["name"] for tool in self.tools if "name" in tool} | {
            each["name"] for space in spaces for each in space["tools"]
        }


# --------------------------------------------------------------------------- the ten shapes

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _claude_code(random: Random) -> Client:
    cache = {"type": "ephemeral"}
    members: dict[str, Any] = {"max_tokens": random.choice([512, 8192, 32000])}
    members["system"] = [{"type": "text", "text": "You are Claude Code.", "cache_control": cache}]
    session = {"device_id": "d" * 64, "account_uuid": "", "session_id": f"{random.getrandbits(64):x}"}
    members["metadata"] = {"user_id": json.dumps(session)}
    kind = random.choice(["adaptive", "enabled", "none", "disabled"])
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
    tools = messages_tools(random, search=random.random() < 0.3)
    options = {"members": members, "reminds": random.random() < 0.4}
    return MessagesClient("claude-code", random, options, tools, headers={"anthropic-beta": _BETAS})


def _anthropic_sdk(random: Random) -> Client:
    members: dict[str, Any] = {"max_tokens": random.choice([256, 4096])}
    for name, value in (("temperature", 0.2), ("top_p", 0.9), ("top_k", 40), ("stop_sequences", ["END"])):
        members |= {name: value} if random.random() < 0.2 else {}
    if random.random() < 0.3:
        shape = {"type": "json_schema", "schema": strict_schema(random)}
        members["output_config"] = {"format": shape}
    tools = messages_tools(random, search=False) if random.random() < 0.6 else []
    if tools and random.random() < 0.2:
        members["tool_choice"] = random.choice([{"type": "any"}, {"type": "auto", "disable_parallel_tool_use": True}])
    return MessagesClient("anthropic-sdk", random, {"members": members}, tools, stream=random.random() < 0.5)


def _codex(random: Random) -> Client:
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
    return ResponsesClient("codex", random, options, codex_tools(random))


def _vercel(random: Random) -> Client:
    members: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"], "max_output_tokens": 4096}
    if random.random() < 0.5:
        members["reasoning"] = {"effort": random.choice(["low", "medium", "high"]), "summary": "auto"}
    if random.random() < 0.3:
        shape = {"type": "json_schema", "name": "answer", "strict": True, "schema": strict_schema(random)}
        members["text"] = {"format": shape}
    tools = [{"type": "function", **tool["function"]} for tool in chat_tools(random, 3)]
    return ResponsesClient("vercel-ai", random, {"members": members}, tools, stream=random.random() < 0.7)


def _chat(shape: str, random: Random, **more: Any) -> ChatClient:
    """`more`: what distinguishes the client."""
    members: dict[str, Any] = more.pop("members", {})
    client = ChatClient(shape, random, {"members": members, **more.pop("options", {})}, **more)
    client.history.append({"role": more.get("role", "system"), "content": f"You are {shape}."})
    return client


def _opencode(random: Random) -> Client:
    members: dict[str, Any] = {"max_tokens": 32000, "temperature": random.choice([0, 0.55, 1])}
    if random.random() < 0.5:
        members["reasoning_effort"] = random.choice(_EFFORTS)
    return _chat("opencode", random, members=members, tools=chat_tools(random, 6), options={"images": True})


def _aider(random: Random) -> Client:
    members = {"temperature": 0}
    return _chat("aider", random, members=members, returns_state=False, options={"reminds": True})


def _cline(random: Random) -> Client:
    members: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 8192}
    if random.random() < 0.4:
        members["reasoning_effort"] = random.choice(["low", "medium", "high"])
    return _chat("cline", random, members=members, tools=chat_tools(random, 5), options={"images": True})


def _continue(random: Random) -> Client:
    members: dict[str, Any] = {"max_tokens": 4096, "stop": ["```", "</s>"], "parallel_tool_calls": False}
    tools = chat_tools(random, 3)
    return _chat("continue", random, members=members, tools=tools, returns_state=False)


def _pydantic(random: Random) -> Client:
    members: dict[str, Any] = {}
    tools = chat_tools(random, 3)
    kind = random.choice(["output tool", "schema", "plain"])
    if kind == "output tool":
        members["tool_choice"] = "required"
    elif kind == "schema":
        shape = {"name": "final_result", "schema": strict_schema(random), "strict": True}
        members["response_format"] = {"type": "json_schema", "json_schema": shape}
    return _chat("pydantic-ai", random, members=members, tools=tools, stream=False)


def _langchain(random: Random) -> Client:
    members: dict[str, Any] = {"temperature": 0.7, "top_p": 1, "n": 1, "frequency_penalty": 0, "presence_penalty": 0}
    if random.random() < 0.3:
        members["response_format"] = {"type": "json_object"}
    tools = chat_tools(random, 4) if random.random() < 0.7 else []
    options = {"names": True}
    return _chat("langchain", random, members=members, tools=tools, returns_state=False, options=options, stream=False)


def _openai_sdk(random: Random) -> Client:
    members: dict[str, Any] = {
        "user": "u" * random.choice([8, 64]),
        "seed": 7,
        "metadata": {"team": "a"},
        "store": False,
    }
    for name, value in (("service_tier", "auto"), ("logit_bias", {}), ("max_completion_tokens", 900)):
        members |= {name: value} if random.random() < 0.4 else {}
    tools = chat_tools(random, 4) if random.random() < 0.5 else []
    return _chat("openai-sdk", random, members=members, tools=tools, stream=random.random() < 0.5)


SHAPES = (_claude_code, _codex, _opencode, _aider, _cline, _continue, _pydantic, _langchain, _vercel, _openai_sdk)
SHAPES_ALL = (*SHAPES, _anthropic_sdk)


def new_client(seed: int) -> Client:
    """The client of a conversation."""
    return SHAPES_ALL[seed % len(SHAPES_ALL)](Random(seed))
