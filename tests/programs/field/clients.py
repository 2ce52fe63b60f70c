"""Clients of the three dialects: the history that each keeps of the answers, and what it sends next.

`odd`: share of steps with what few clients send: two turns of one role, an empty turn, a user's text after results, a
message of the system in the middle, arguments cut short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.interface import Operation
from tests.programs.field.dice import Dice

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
DATA_URL = f"data:image/png;base64,{PIXEL}"
PDF = "JVBERi0xLjQKJSVFT0YK"
_PDF_URL = f"data:application/pdf;base64,{PDF}"
_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
_MINE = ("role", "content", "tool_calls")


@dataclass
class Client:
    """`history`: in the caller's own dialect. `returns_state`: all that an answer held comes back."""

    shape: str
    random: Dice
    options: dict[str, Any] = field(default_factory=dict)
    tools: list[Any] = field(default_factory=list)
    history: list[Any] = field(default_factory=list)
    stream: bool = True
    returns_state: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    waiting: list[Any] = field(default_factory=list)  # calls without a result
    searches: bool = False  # this step offers the provider's own search

    operation = Operation.CHAT

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def is_odd(self, share: float) -> bool:
        """`share`: of the steps of an odd client."""
        return self.chance(float(self.options.get("odd", 0)) * share)

    def proceed(self, number: int) -> None:
        """Add the results of open calls, or what the user says next."""
        self.searches = bool(self.options.get("searches")) and self.chance(0.3)
        if self.waiting:
            self.add_results()
            if self.is_odd(0.3):
                self.add_after_results(number)
        if not self.history or not self.last_is_open():
            if self.is_odd(0.3):
                self.add_odd_turn(number)
            self.add_user(number)
            if self.options.get("begins") and self.is_odd(0.2):
                self.add_beginning()

    def last_is_open(self) -> bool:
        return False

    def add_results(self) -> None: ...
    def add_after_results(self, number: int) -> None: ...
    def add_user(self, number: int) -> None: ...
    def add_beginning(self) -> None: ...
    def add_odd_turn(self, number: int) -> None:
        """Before the user's turn."""

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
            content = [{"type": "text", "text": content}, {"type": "image_url", "image_url": {"url": DATA_URL}}]
        turn = {"role": "user", "content": content}
        if self.options.get("names"):
            turn["name"] = "alice"
        if self.options.get("reminds") and number and self.chance(0.4):
            self.history.append({"role": "system", "content": "Reminder: keep to the format."})
        self.history.append(turn)

    def add_odd_turn(self, number: int) -> None:
        """A greeting, a turn that the user interrupted, an earlier try, a reminder."""
        odd = self.random.choice(["greeting", "empty", "twice", "system", "blank", "two answers"])
        if odd == "empty" or (odd == "twice" and number):
            self.history.append({"role": "user", "content": f"Try {number}."})
        if odd == "twice":
            self.history.append({"role": "user", "name": "bob", "content": "Wait."})
        elif odd in ("greeting", "empty", "two answers"):
            self.history.append({"role": "assistant", "content": "" if odd == "empty" else "How can I help?"})
        elif odd == "system":
            role = self.options.get("role", "system")
            self.history.append({"role": role, "content": "The user is back."})
        elif odd == "blank":
            self.history.append(
                {"role": "user", "content": [{"type": "text", "text": " "}, {"type": "text", "text": "A."}]}
            )

    def add_beginning(self) -> None:
        """The beginning of the answer, to be continued."""
        self.history.append({"role": "assistant", "content": "Sure:"})

    def add_after_results(self, number: int) -> None:
        if self.chance(0.3):
            self.history.append({"role": "system", "content": "Results are cut at 30,000 characters."})
        self.add_user(number)

    def add_results(self) -> None:
        for call in self.waiting:
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": f"done {call['id'][:4]}"})
            if self.is_odd(0.1):
                self.history[-1]["content"] = self.random.choice(["", [{"type": "text", "text": "done"}]])
            if self.options.get("names"):
                self.history[-1]["name"] = (call.get("function") or call.get("custom"))["name"]
        self.waiting = []

    def body(self) -> dict[str, Any]:
        body = {"messages": list(self.history), **self.options["members"]}
        if self.tools or self.options.get("lists_none"):
            body["tools"] = self.tools
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def take(self, answer: Mapping[str, Any]) -> None:
        message = {name: value for name, value in answer.items() if value is not None or name == "content"}
        if self.options.get("dumps"):  # as openai-python's model_dump writes a message
            message = {"refusal": None, "annotations": [], "audio": None, "function_call": None} | message
            message.setdefault("tool_calls", None)
        if not self.returns_state:
            message = {name: message[name] for name in _MINE if name in message}
            for call in message.get("tool_calls") or ():
                call.pop("extra_content", None)
                call.pop("index", None)
        for call in message.get("tool_calls") or ():
            call.setdefault("id", f"call_{self.random.getrandbits(64):016x}")
            if "function" in call and self.is_odd(0.1):  # as they were when the caller stopped reading
                call["function"] = {**call["function"], "arguments": call["function"]["arguments"][:6]}
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
            blocks.append(_IMAGE)
        self.history.append({"role": "user", "content": blocks if self.chance(0.6) else blocks[0]["text"]})
        if self.options.get("reminds") and number and self.chance(0.3):
            self.history.append({"role": "system", "content": "The working folder has changed."})

    def add_odd_turn(self, number: int) -> None:
        odd = self.random.choice(["twice", "blank", "document", "url"])
        blocks: list[Any] = [{"type": "text", "text": "Wait."}]
        if odd == "blank":
            blocks.append({"type": "text", "text": " "})
        elif odd == "document":
            source = {"type": "base64", "media_type": "application/pdf", "data": PDF}
            blocks.append({"type": "document", "source": source, "title": "a.pdf"})
        elif odd == "url":
            blocks.append({"type": "image", "source": {"type": "url", "url": "https://pictures.field.test/a.png"}})
        self.history.append({"role": "user", "content": blocks})

    def add_after_results(self, number: int) -> None:
        """A reminder beside the results, in their turn."""
        self.history[-1]["content"].append({"type": "text", "text": "<system-reminder>Go on.</system-reminder>"})

    def add_results(self) -> None:
        blocks: list[Any] = []
        for call in self.waiting:
            content: Any = f"done {call['id'][:4]}"
            if call["name"] == "ToolSearch":
                content = [{"type": "tool_reference", "tool_name": self.tools[-1]["name"]}]
            elif self.chance(0.15):
                content = [{"type": "text", "text": content}, _IMAGE]
            elif self.is_odd(0.1):
                content = []
            blocks.append({"type": "tool_result", "tool_use_id": call["id"], "content": content})
            if self.chance(0.1):
                blocks[-1] |= {"is_error": True, "content": "it failed"}
        self.history.append({"role": "user", "content": blocks})
        self.waiting = []

    def body(self) -> dict[str, Any]:
        body = {"messages": list(self.history), "stream": self.stream, **self.options["members"]}
        tools = self.tools
        if self.searches:
            tools = [*tools, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
        return {**body, "tools": tools} if tools else body

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
            parts.append({"type": "input_image", "image_url": DATA_URL, "detail": detail})
        self.history.append({"type": "message", "role": "user", "content": parts})

    def add_odd_turn(self, number: int) -> None:
        odd = self.random.choice(["greeting", "twice", "developer", "file"])
        role = {"greeting": "assistant", "developer": "developer"}.get(odd, "user")
        parts: list[Any] = [{"type": "output_text" if role == "assistant" else "input_text", "text": "Wait."}]
        if odd == "file":
            parts.append({"type": "input_file", "filename": "a.pdf", "file_data": _PDF_URL})
        self.history.append({"type": "message", "role": role, "content": parts})

    def add_after_results(self, number: int) -> None:
        self.add_user(number)

    def add_results(self) -> None:
        for call in self.waiting:
            kind = "custom_tool_call_output" if call["type"] == "custom_tool_call" else "function_call_output"
            output: Any = f"done {call['call_id'][:4]}"
            if self.is_odd(0.2):  # as of Codex' view_image
                output = [{"type": "input_image", "image_url": DATA_URL}]
            self.history.append({"type": kind, "call_id": call["call_id"], "output": output})
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
