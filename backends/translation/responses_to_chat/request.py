"""Turns requests of OpenAI's Responses into requests for chat completions.

- The gateway keeps no responses: what refers to one (`previous_response_id`, `conversation`, item references,
  background responses) and tools that run at the provider are refused by name; Codex's are left out
  (`refuse_tool`).
- An item of an earlier reply carries its id, status, annotations and logprobs: no part of a prompt, left out. So is the
  telemetry that Codex 0.169 adds for OpenAI (`client_metadata`). The parts of an assistant's turn (reasoning, text,
  calls) become one message, as chat completions write a turn.
- Images and files in the result of a call follow in the user's message: a chat's tool messages hold texts alone.
- Reasoning text is returned in the clear, as its own summary where the caller asks for one, and accepted back as it was
  returned: a caller's wish for summaries or encrypted reasoning is met. Foreign encrypted reasoning is refused.

Sources: types of openai-python 3.54, platform.openai.com/docs/guides/migrate-to-responses (2026-11); requests of Codex
0.169.0 (2026-11).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from backends.translation.omissions import Omissions
from backends.translation.request_members import SAME_MEMBERS, Members, PartReader, read_audio, read_refusal
from backends.translation.translation import Json, UntranslatableError

# vLLM's extensions, common to both dialects.
EXTENSIONS = tuple(
    "top_k min_p seed stop stop_token_ids logit_bias presence_penalty frequency_penalty repetition_penalty ignore_eos "
    "skip_special_tokens include_stop_str_in_output cache_salt priority chat_template_kwargs mm_processor_kwargs "
    "structured_outputs".split()
)
_OF_REPLY = ("id", "status", "annotations", "logprobs")  # members of an item or a part left from the earlier reply
_TELEMETRY = ("client_metadata", "internal_chat_message_metadata_passthrough")  # of Codex: of the body, of items
_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
STATELESS = "the gateway keeps no responses for a backend that speaks chat completions: send the whole input instead"


def responses_to_chat(body: Mapping[str, Any], dropped: Omissions) -> Json:
    members = Members(body, dropped)
    for name in ("previous_response_id", "conversation"):
        if members.take(name) is not None:
            members.refuse(name, f"'{name}': {STATELESS}")
    chat: Json = {**members.take_all(SAME_MEMBERS), **members.take_all(EXTENSIONS), "messages": _messages(members)}
    if (limit := members.take("max_output_tokens")) is not None:
        chat["max_completion_tokens"] = limit
    if members.take("store") is True:  # absent and false: the gateway keeps nothing, and chat backends keep nothing
        chat["store"] = True
    chat |= _tools(members) | _text(members) | _reasoning(members) | _logprobs(members)
    members.take_all(_TELEMETRY)
    members.default("background", False)
    members.default("truncation", "disabled")
    _stream_options(members)
    members.close()
    return chat


def _stream_options(members: Members) -> None:
    """A stream of Responses has its usage in any case, and no padding against eavesdroppers (`include_obfuscation`)."""
    options = members.take("stream_options") or {}
    if not isinstance(options, Mapping) or any(value for name, value in options.items() if name != "include_usage"):
        members.refuse("stream_options")


# -- messages --------------------------------------------------------------------------------


def _messages(members: Members) -> list[Json]:
    history = _History()
    if "instructions" in members:
        history.messages.append({"role": "system", "content": members.text("instructions")})
    if type(given := members.take("input")) is str:
        history.messages.append({"role": "user", "content": given})
    else:
        for item in members.each("input", given):
            history.add(item)
        history.close()
    return history.messages


class _History:
    """Collects items into messages. `_turn`: the message of the assistant that further items belong to."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._turn: Json | None = None
        self._media: list[Json] = []  # parts of tool results

    def add(self, item: Members) -> None:
        role, kind = item.take("role"), item.kind()
        if not kind:
            kind = "message" if role is not None else "item_reference"
        if (read := _ITEMS.get(kind)) is None:
            return item.refuse_kind(kind)
        item.take_all((*_OF_REPLY, *_TELEMETRY))
        item.label("phase")  # of a text: commentary, or the final answer
        if read is not _History.output and role != "user":
            self.close()
        read(self, item, role)
        return item.close()

    def message(self, item: Members, role: Any) -> None:
        content = item.content(_ASSISTANT_PARTS if role == "assistant" else _INPUT_PARTS, of_reply=_OF_REPLY)
        if role != "assistant":
            self._turn = None
            media, self._media = self._media, []
            self.messages.append({"role": role, "content": [*media, *_parts(content)] if media else content})
            return
        turn = self._open(lambda turn: "content" not in turn or "tool_calls" in turn)
        parts = [*_parts(turn.get("content", "")), *_parts(content)]
        turn["content"] = _joined(parts)

    def reasoning(self, item: Members, _role: Any) -> None:
        """Texts of the reasoning; its summary only where there is nothing else."""
        if item.take("encrypted_content") is not None:
            item.refuse("encrypted_content")
        contents, summaries = ([part.take("text") for part in item.objects(name)] for name in ("content", "summary"))
        text = "".join(map(str, contents)) or "\n\n".join(map(str, summaries))
        if text:
            turn = self._open(lambda turn: "content" not in turn or "tool_calls" in turn)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def function_call(self, item: Members, _role: Any) -> None:
        function = {"name": item.text("name"), "arguments": item.text("arguments")}
        self._call({"id": item.text("call_id"), "type": "function", "function": function})

    def custom_call(self, item: Members, _role: Any) -> None:
        custom = {"name": item.text("name"), "input": item.text("input")}
        self._call({"id": item.text("call_id"), "type": "custom", "custom": custom})

    def output(self, item: Members, _role: Any) -> None:
        """Result of a call. Chat completions know texts alone: images and files follow in the user's message."""
        self._turn = None
        content = item.content(_OUTPUT_PARTS, "output", _OF_REPLY)
        if media := [part for part in _parts(content) if part["type"] != "text"]:
            self._media += media
            content = [part for part in _parts(content) if part["type"] == "text"] or ""
        item.take("name")  # of the call, which the history repeats
        self.messages.append({"role": "tool", "tool_call_id": item.text("call_id"), "content": content})

    def close(self) -> None:
        """End the results of a turn: media of theirs follow all of them."""
        if self._media:
            self.messages.append({"role": "user", "content": self._media})
            self._media = []

    def _call(self, call: Json) -> None:
        self._open(lambda _: True).setdefault("tool_calls", []).append(call)

    def _open(self, continues: Callable[[Json], bool]) -> Json:
        """The message of the assistant that takes the next item."""
        if self._turn is None or not continues(self._turn):
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn


_ITEMS: Mapping[str, Callable[[_History, Members, Any], None]] = {
    "message": _History.message,
    "reasoning": _History.reasoning,
    "function_call": _History.function_call,
    "function_call_output": _History.output,
    "custom_tool_call": _History.custom_call,
    "custom_tool_call_output": _History.output,
}


# -- content ---------------------------------------------------------------------------------


def _read_text(part: Members) -> Json:
    return {"type": "text", "text": part.text("text")}


def _read_image(part: Members) -> Json | None:
    if "image_url" not in part:
        part.refuse("file_id")
        return None
    image = {"url": part.text("image_url")}
    if (detail := part.take("detail")) not in (None, "auto"):
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def _read_file(part: Members) -> Json | None:
    if "file_url" in part:
        part.refuse("file_url")
        return None
    part.default("detail", "auto")
    return {"type": "file", "file": part.take_all(("file_data", "file_id", "filename"))}


_TEXTS: Mapping[str, PartReader] = {"input_text": _read_text, "output_text": _read_text, "text": _read_text}
_ASSISTANT_PARTS = {**_TEXTS, "refusal": read_refusal}
_OUTPUT_PARTS = {**_TEXTS, "input_image": _read_image, "input_file": _read_file}
_INPUT_PARTS = {**_OUTPUT_PARTS, "input_audio": read_audio}


def _joined(parts: list[Json]) -> str | list[Json]:
    """No text and a single text as a string: templates of many engines read no parts of an assistant."""
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        return str(parts[0]["text"])
    return parts or ""


def _parts(content: str | list[Json]) -> list[Json]:
    return [{"type": "text", "text": content}] * bool(content) if isinstance(content, str) else content


# -- tools, text, reasoning -------------------------------------------------------------------


def _tools(members: Members) -> Json:
    found: Json = {}
    given = members.take("tools")
    beside_own = has_own_tools(given)
    tools = [read for tool in members.each("tools", given) if (read := _tool(tool, beside_own)) is not None]
    if tools:
        found["tools"] = tools
    if (choice := members.take("tool_choice")) is not None and (read := _tool_choice(members, choice)) is not None:
        found["tool_choice"] = read
    return found


def _tool(tool: Members, beside_own: bool) -> Json | None:
    kind = tool.kind()
    if kind == "function":
        function = {"name": tool.text("name"), **tool.take_all(("description", "parameters"))}
        tool.take("defer_loading")  # a hint: a tool that is loaded at once is the same tool
        if tool.take("strict") is True:
            function["strict"] = True
    elif kind == "custom":
        function = {"name": tool.text("name"), **tool.take_all(("description",))}
        if (shape := tool.take("format")) is not None:
            function["format"] = _grammar(Members(shape, tool.dropped, tool.at("format")))
    else:  # runs at the provider
        refuse_tool(tool, kind, beside_own)
        return None
    tool.close()
    return {"type": kind, kind: function}


def _grammar(shape: Members) -> Json:
    kind = shape.kind()
    grammar = {"grammar": shape.take_all(("definition", "syntax"))} if kind == "grammar" else {}
    found = {"type": kind, **grammar}
    shape.close()
    return found


def _tool_choice(members: Members, choice: Any) -> Any:
    if type(choice) is str:
        return choice
    wanted = Members(choice, members.dropped, "tool_choice")
    kind = wanted.kind()
    if kind == "allowed_tools":
        tools = [each for tool in wanted.objects("tools") if (each := _named(tool, tool.kind())) is not None]
        found: Json | None = {"type": kind, kind: {"mode": wanted.take("mode"), "tools": tools}}
    else:
        found = _named(wanted, kind)
    wanted.close()
    return found


def _named(tool: Members, kind: str) -> Json | None:
    if kind not in ("function", "custom"):
        tool.refuse_kind(kind)
        return None
    return {"type": kind, kind: {"name": tool.text("name")}}


def _text(members: Members) -> Json:
    if (given := members.take("text")) is None:
        return {}
    text = Members(given, members.dropped, "text")
    found = text.take_all(("verbosity",))
    if (shape := text.take("format")) is not None:
        if isinstance(shape, dict) and shape.get("type") == "json_schema":
            schema = {name: value for name, value in shape.items() if name != "type" and value is not None}
            shape = {"type": "json_schema", "json_schema": schema}
        found["response_format"] = shape
    text.close()
    return found


def _reasoning(members: Members) -> Json:
    if (given := members.take("reasoning")) is None:
        return {}
    reasoning = Members(given, members.dropped, "reasoning")
    effort = reasoning.take("effort")
    reasoning.default("summary", "auto", "concise", "detailed")
    reasoning.default("generate_summary", "auto", "concise", "detailed")
    reasoning.default("context", "auto")
    reasoning.default("mode", "standard")
    reasoning.close()
    return {} if effort is None else {"reasoning_effort": effort}


def _logprobs(members: Members) -> Json:
    found: Json = {}
    for wish in map(str, members.array("include")):
        if wish == _LOGPROBS:
            found["logprobs"] = True
        elif wish != _ENCRYPTED and not members.dropped.drop(wish):
            raise UntranslatableError("include", f"'include': '{wish[:64]}' is not given by this backend")
    if (top := members.take("top_logprobs")) is not None and top != 0:
        found |= {"logprobs": True, "top_logprobs": top}
    return found


# -- tools that only a provider can run ------------------------------------------------------------
#
# Tools that agents offer beside their own functions, and that only a provider can run.
#
# Codex 0.169 offers search (`web_search`) and groups of tools (`namespace`) in every request, and works on without:
# beside functions of the caller they are left out, and noted. A request that offers nothing else is refused by name,
# and so is one whose `tool_choice` names such a tool.


_OPTIONAL = ("namespace", "web_search")
_OWN = ("function", "custom")  # run by the caller


def has_own_tools(tools: Any) -> bool:
    return isinstance(tools, list) and any(isinstance(tool, dict) and tool.get("type") in _OWN for tool in tools)


def refuse_tool(tool: Members, kind: str, beside_own: bool) -> None:
    """Leave out a tool that the caller can do without. Raises UntranslatableError for another, unless it is dropped."""
    if not (beside_own and kind in _OPTIONAL):
        tool.refuse_kind(kind)
    elif not tool.dropped.drop(tool.at(kind)):
        tool.dropped.leave_out(tool.at(kind))
