"""Turns requests of OpenAI's Responses into requests for chat completions.

- The gateway keeps no responses: what refers to one (`previous_response_id`, `conversation`, background responses) and
  tools that run at the provider are refused by name; those that an agent can do without are left out (`refuse_tool`).
- An item of an earlier reply carries its id, status, annotations and logprobs: no part of a prompt, left out. So is the
  telemetry that Codex 0.169 adds for OpenAI (`client_metadata`). The parts of an assistant's turn (reasoning, text,
  calls) become one message, as chat completions write a turn.
- Images and files in the result of a call follow in the user's message: a chat's tool messages hold texts alone.
- Reasoning text is returned in the clear, as its own summary where the caller asks for one, and accepted back as it was
  returned. Encrypted reasoning of another maker is left out, and noted.
- Tools of a namespace are functions of one flat list (`namespaces`), a search for tools that the caller runs is one
  more function.
- Items of a provider's own tools become texts, or are left out and noted (`provider_items`).

Sources: types of openai-python 3.54, platform.openai.com/docs/guides/migrate-to-responses (2026-11); requests of Codex
0.169.0 (2026-11).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import msgspec

from backends.translation.omissions import Omissions
from backends.translation.request_members import SAME_MEMBERS, Members, PartReader, read_audio, read_refusal
from backends.translation.responses_to_chat.namespaces import TOOL_SEARCH, Namespaces, offered_tools
from backends.translation.responses_to_chat.provider_items import as_text, found_tools, is_providers
from backends.translation.translation import Json, UntranslatableError
from backends.translation.turn_state.chat_state import details_text, merged, restored
from backends.translation.turn_state.history import STATE

# vLLM's extensions, common to both dialects.
EXTENSIONS = tuple(
    "top_k min_p seed stop stop_token_ids logit_bias presence_penalty frequency_penalty repetition_penalty ignore_eos "
    "skip_special_tokens include_stop_str_in_output cache_salt priority chat_template_kwargs mm_processor_kwargs "
    "structured_outputs".split()
)
_OF_REPLY = ("id", "status", "annotations", "logprobs")  # members of an item or a part left from the earlier reply
_TELEMETRY = ("client_metadata", "internal_chat_message_metadata_passthrough")  # of Codex: of the body, of items
_DETAILS = ("low", "high")  # image details in a chat, besides the default
_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
NAMESPACE = "namespace"
_encode = msgspec.json.Encoder().encode
STATELESS = "the gateway keeps no responses for a backend that speaks chat completions: send the whole input instead"


def responses_to_chat(body: Mapping[str, Any], dropped: Omissions) -> Json:
    members = Members(body, dropped)
    for name in ("previous_response_id", "conversation"):
        if members.take(name) is not None:
            members.refuse(name, f"'{name}': {STATELESS}")
    names = Namespaces(body)
    chat: Json = {**members.take_all(SAME_MEMBERS), **members.take_all(EXTENSIONS)}
    chat["messages"] = _messages(members, names)
    if (limit := members.take("max_output_tokens")) is not None:
        chat["max_completion_tokens"] = limit
    if members.take("store") is True:  # absent and false: the gateway keeps nothing, and chat backends keep nothing
        chat["store"] = True
    chat |= _tools(members, names, body) | _text(members) | _reasoning(members) | _logprobs(members)
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


def _messages(members: Members, names: Namespaces) -> list[Json]:
    history = _History(names)
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

    def __init__(self, names: Namespaces) -> None:
        self._names = names
        self._late: Json = {}  # state of calls by id
        self.messages: list[Json] = []
        self._turn: Json | None = None
        self._media: list[Json] = []  # parts of tool results

    def add(self, item: Members) -> None:
        role, kind = item.take("role"), item.kind()
        if not kind:
            kind = "message" if role is not None else "item_reference"
        if (read := _ITEMS.get(kind)) is None:
            return self._providers(item, kind) if is_providers(kind) else item.refuse_kind(kind)
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
        """Add reasoning text, or else the summary, to the turn, with the provider state."""
        if item.take("encrypted_content") is not None:  # not sealed by this gateway
            item.dropped.leave_out("input.reasoning.encrypted_content")
        state = item.take(STATE) or {}
        contents, summaries = ([part.take("text") for part in item.objects(name)] for name in ("content", "summary"))
        text = "".join(map(str, contents)) or "\n\n".join(map(str, summaries))
        self._late = merged(self._late, state.get("calls") or {})
        details, members = restored(state, text), state.get("message") or {}
        if not (text or details or members):
            return
        is_late = not text and self._turn is not None  # beside which no reasoning has come
        turn = self._open(lambda turn: is_late or "content" not in turn or "tool_calls" in turn)
        if text := text or details_text(details):
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        if details:
            turn["reasoning_details"] = [*turn.get("reasoning_details", ()), *details]
        turn.update(merged({name: turn[name] for name in members if name in turn}, members))

    def function_call(self, item: Members, _role: Any) -> None:
        name = self._names.flat(item.take("namespace"), item.text("name"))
        self._call(item, "function", {"name": name, "arguments": item.text("arguments")})

    def custom_call(self, item: Members, _role: Any) -> None:
        name = self._names.flat(item.take("namespace"), item.text("name"))
        self._call(item, "custom", {"name": name, "input": item.text("input")})

    def search_call(self, item: Members, _role: Any) -> None:
        """A search for tools, which the caller has run."""
        item.take("execution")
        arguments = item.take("arguments")
        given = arguments if isinstance(arguments, str) else _encode(arguments or {}).decode()
        if "call_id" in item:
            self._call(item, "function", {"name": TOOL_SEARCH, "arguments": given})

    def search_output(self, item: Members, _role: Any) -> None:
        item.take("execution")
        said = found_tools({"tools": item.take("tools")})
        if "call_id" in item:
            self._turn = None
            self.messages.append({"role": "tool", "tool_call_id": item.text("call_id"), "content": said})

    def _providers(self, item: Members, kind: str) -> None:
        """An item of a provider's own tool: a text of the assistant, or left out."""
        place = item.at(kind)
        if not item.dropped.drop_known(place):
            text = as_text(kind, item.rest())
            if text:
                self.close()
                turn = self._open(lambda turn: "tool_calls" not in turn)
                turn["content"] = _joined([*_parts(turn.get("content", "")), {"type": "text", "text": text}])
            else:
                item.dropped.leave_out(place)

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
        self._return_late()
        if self._media:
            self.messages.append({"role": "user", "content": self._media})
            self._media = []

    def _call(self, item: Members, kind: str, named: Json) -> None:
        state = item.take(STATE) or {}
        call = {"id": item.text("call_id"), "type": kind, kind: {**named, **state.get("function", {})}}
        self._open(lambda _: True).setdefault("tool_calls", []).append({**call, **state.get("call", {})})

    def _return_late(self) -> None:
        """State of calls that has come after the calls."""
        if not self._late:
            return
        calls = [call for message in self.messages for call in message.get("tool_calls") or ()]
        for call in calls:
            if (state := self._late.pop(call["id"], None)) is not None:
                kind = call["type"]
                call |= {**state.get("call", {}), kind: {**call[kind], **state.get("function", {})}}

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
    "tool_search_call": _History.search_call,
    "tool_search_output": _History.search_output,
}


# -- content ---------------------------------------------------------------------------------


def _read_text(part: Members) -> Json:
    return {"type": "text", "text": part.text("text")}


def _read_image(part: Members) -> Json | None:
    if "image_url" not in part:
        part.refuse("file_id")
        return None
    image = {"url": part.text("image_url")}
    if (detail := part.take("detail")) in _DETAILS:
        image["detail"] = detail
    elif detail not in (None, "auto"):
        part.dropped.leave_out("input.content.detail")
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


def _tools(members: Members, names: Namespaces, body: Mapping[str, Any]) -> Json:
    found: Json = {}
    given = members.take("tools")
    beside_own = has_own_tools(given)
    tools = [read for tool in members.each("tools", given) for read in _read_tool(tool, names, beside_own)]
    offered = {name_of(tool) for tool in tools}
    searched = members.each("input.tools", [dict(tool) for tool in offered_tools({"input": body.get("input")})])
    for read in chain.from_iterable(_read_tool(tool, names, True) for tool in searched):
        if name_of(read) not in offered:
            offered.add(name_of(read))
            tools.append(read)
    if tools:
        found["tools"] = tools
    choice = members.take("tool_choice")
    if choice is not None and (chosen := _tool_choice(members, choice, names)) is not None:
        found["tool_choice"] = chosen
    return found


def name_of(tool: Json) -> str:
    return str(tool[tool["type"]]["name"])


def _read_tool(tool: Members, names: Namespaces, beside_own: bool) -> list[Json]:
    """A tool as those of a chat; a namespace is several."""
    kind = tool.kind()
    if kind != NAMESPACE:
        read = _search(tool) if kind == TOOL_SEARCH and _is_callers(tool) else _tool(tool, kind, beside_own)
        return [] if read is None else [read]
    if tool.dropped.drop_known(tool.at(kind)):
        return []
    namespace = tool.text("name")
    tool.label("description")
    found = []
    for each in tool.objects("tools"):
        if (read := _tool(each, each.kind(), True)) is not None:
            named = read[read["type"]]
            named["name"] = names.flat(namespace, named["name"])
            found.append(read)
    tool.take("defer_loading")
    tool.close()
    return found


def _is_callers(tool: Members) -> bool:
    """The caller runs the search, as Codex does."""
    return bool(tool.take("execution") == "client")


def _search(tool: Members) -> Json:
    parameters = tool.take("parameters") or {"type": "object", "properties": {}}
    function = {"name": TOOL_SEARCH, **tool.take_all(("description",)), "parameters": parameters}
    tool.close()
    return {"type": "function", "function": function}


def _tool(tool: Members, kind: str, beside_own: bool) -> Json | None:
    if kind == "function":
        function = {"name": tool.text("name"), **tool.take_all(("description", "parameters"))}
        tool.take("defer_loading")  # a hint: a tool that is loaded at once is the same tool
        if tool.take("strict") is True:
            function["strict"] = True
    elif kind == "custom":
        function = {"name": tool.text("name"), **tool.take_all(("description",))}
        tool.take("defer_loading")
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


def _tool_choice(members: Members, choice: Any, names: Namespaces) -> Any:
    if type(choice) is str:
        return choice
    wanted = Members(choice, members.dropped, "tool_choice")
    kind = wanted.kind()
    if kind == "allowed_tools":
        tools = [each for tool in wanted.objects("tools") if (each := _named(tool, tool.kind(), names)) is not None]
        found: Json | None = {"type": kind, kind: {"mode": wanted.take("mode"), "tools": tools}}
    else:
        found = _named(wanted, kind, names)
    wanted.close()
    return found


def _named(tool: Members, kind: str, names: Namespaces) -> Json | None:
    if kind not in ("function", "custom"):
        tool.refuse_kind(kind)
        return None
    return {"type": kind, kind: {"name": names.flat(tool.take("namespace"), tool.text("name"))}}


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
# Built-in tools of agents that only a provider can run.
#
# Codex 0.169 offers search (`web_search`) in every request, and works without. Beside the caller's own tools,
# `web_search` is left out and noted. A request with built-in tools alone is refused by name, and so is a `tool_choice`
# that names a built-in tool.


_OPTIONAL = ("web_search", "tool_search", "image_generation")
_OWN = ("function", "custom", NAMESPACE)  # run by the caller


def has_own_tools(tools: Any) -> bool:
    return isinstance(tools, list) and any(isinstance(tool, dict) and tool.get("type") in _OWN for tool in tools)


def refuse_tool(tool: Members, kind: str, beside_own: bool) -> None:
    """Leave out an optional built-in tool. Raises UntranslatableError for any other tool, unless the route drops it."""
    if not (beside_own and kind in _OPTIONAL):
        tool.refuse_kind(kind)
    elif not tool.dropped.drop(tool.at(kind)):
        tool.dropped.leave_out(tool.at(kind))
