"""Turns requests of Anthropic's Messages into requests for chat completions.

Anthropic's members: API reference, Messages (platform.claude.com/docs, November 2026). OpenAI's: API reference, chat
completions (November 2026). Choices where the dialects differ:
- Thinking of earlier turns becomes `reasoning_content`, as engines read it, and `reasoning_details` (OpenRouter), which
  keeps signatures. A budget of thinking becomes an effort. Adaptive thinking without an effort is a chat's default.
- Tool results of a turn become messages of the role `tool`; images within follow in the user's message. The sign of a
  failed tool (`is_error`) becomes the word `Error:`.
- Blocks of a provider's own tools in the history become texts (`provider_blocks`).
- Hints about speed, and fallbacks of the provider's, are left out and noted: the answer is the same.
- State that a seal has kept (`turn_state.history`) becomes the members of the chat that it was.
- Hints about caches have no effect on an answer and are left out; so are labels beside the user's in `metadata`, which
  is noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from backends.translation.messages_to_chat.provider_blocks import as_text, is_providers
from backends.translation.omissions import Omissions
from backends.translation.request_members import ANY, LABEL, present, refuse, refuse_others
from backends.translation.tool_arguments import PDF_NAME, as_object, data_url, reasoning_detail
from backends.translation.translation import Json
from backends.translation.turn_state.chat_state import details_text, merged, restored
from backends.translation.turn_state.history import STATE

SCHEMA_NAME = "output"  # of a JSON schema, which has a name in chat alone

_SAME = ("model", "temperature", "top_p", "top_k", "stream")  # `top_k` is an extension of many chats
_KNOWN: Mapping[str, Any] = {
    **dict.fromkeys(_SAME, ANY),
    **dict.fromkeys(("messages", "system", "max_tokens", "stop_sequences", "metadata", "service_tier"), ANY),
    **dict.fromkeys(("tools", "tool_choice", "thinking", "output_config", "context_management"), ANY),
    "cache_control": ANY,  # without effect on the answer
    "diagnostics": LABEL,
    "fallbacks": LABEL,
    "speed": ANY,
}
_TOOL = {
    **dict.fromkeys(("type", "name", "description", "input_schema", "strict"), ANY),
    **dict.fromkeys(("cache_control", "eager_input_streaming", "defer_loading"), ANY),
    "allowed_callers": ["direct"],
    "input_examples": [],
}
_BLOCK = dict.fromkeys(("type", "cache_control"), ANY)
_TOOL_BLOCK = {**_BLOCK, **dict.fromkeys(("id", "tool_use_id", "name", "input", "content", "is_error"), ANY)}
_BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "text": {**_BLOCK, "text": ANY, "citations": LABEL},
    "image": {**_BLOCK, "source": ANY, "transformations": {}},
    "document": {**_BLOCK, **dict.fromkeys(("source", "title", "context"), ANY), "citations": {"enabled": False}},
    "tool_use": {**_TOOL_BLOCK, "caller": ANY, STATE: ANY},
    "tool_result": _TOOL_BLOCK,
    "thinking": {**_BLOCK, "thinking": ANY, "signature": ANY, STATE: ANY},
    "redacted_thinking": {**_BLOCK, "data": ANY, STATE: ANY},
}
_DIRECT = {"type": "direct"}
_SEARCH = "tool_search_tool"  # a tool of the provider, with the way of searching and a date behind it
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TIERS = {"auto": "auto", "standard_only": "default"}
_SPEEDS = {"fast": "priority", "standard": "default"}  # tiers in the chat dialect
_EFFORTS = ((2048, "low"), (8192, "medium"))  # by the budget of thinking tokens, at most; else high
_KEPT_THINKING = {"keep": "all"}  # an edit of the context that edits nothing
_encode = msgspec.json.Encoder().encode


def messages_to_chat(body: Mapping[str, Any], dropped: Omissions) -> Json:
    members = present(body, dropped)
    refuse_others(members, _KNOWN, "", dropped)
    chat: Json = {name: members[name] for name in _SAME if name in members}
    turns = members["messages"]
    if turns and turns[-1]["role"] == "assistant":
        refuse("messages", dropped, "an answer cannot continue a message of the assistant")
    chat["messages"] = [*_system(members), *chain.from_iterable(_turn(turn, dropped) for turn in turns)]
    if "max_tokens" in members:
        chat["max_completion_tokens"] = members["max_tokens"]
    if members.get("stop_sequences"):
        chat["stop"] = members["stop_sequences"]
    return chat | _tools(members, dropped) | _options(members, dropped)


def _service_tier(members: Mapping[str, Any], dropped: Omissions) -> Json:
    """A chat has one member for the tier and the speed: the speed counts first."""
    found: Json = {}
    for name, known in (("service_tier", _TIERS), ("speed", _SPEEDS)):
        if members.get(name) in known:
            found = {"service_tier": known[members[name]]}
        elif name in members:
            dropped.leave_out(name)
    return found


def _options(members: Mapping[str, Any], dropped: Omissions) -> Json:
    """Options of the request: user, reasoning effort, response format."""
    options: Json = {}
    metadata = members.get("metadata", {})
    if metadata.keys() - {"user_id"}:
        dropped.leave_out("metadata")
    if metadata.get("user_id") is not None:
        options["user"] = metadata["user_id"]
    config = members.get("output_config", {})
    refuse_others(config, {"effort": ANY, "format": ANY}, "output_config", dropped)
    if config.get("format") is not None:
        schema = {"name": SCHEMA_NAME, "schema": config["format"]["schema"], "strict": True}
        options["response_format"] = {"type": "json_schema", "json_schema": schema}
    effort = _effort(members.get("thinking", {}), dropped) or config.get("effort")
    if effort is not None:
        options["reasoning_effort"] = effort
    options |= _service_tier(members, dropped)
    for edit in members.get("context_management", {}).get("edits", ()):
        if {name: value for name, value in edit.items() if name != "type"} != _KEPT_THINKING:
            refuse("context_management", dropped)
    return options


def _effort(thinking: Mapping[str, Any], dropped: Omissions) -> str | None:
    kind = thinking.get("type", "adaptive")
    if kind == "disabled":
        return "none"
    if kind == "enabled":
        return next((effort for most, effort in _EFFORTS if thinking["budget_tokens"] <= most), "high")
    if kind == "between_tools":
        dropped.leave_out("thinking")
        return "none"
    if kind != "adaptive":
        refuse("thinking", dropped)
    return None


# --------------------------------------------------------------------------- tools


def _tools(members: Mapping[str, Any], dropped: Omissions) -> Json:
    tools = [_tool(tool) for tool in members.get("tools", ()) if _is_translatable(tool, dropped)]
    if not tools:
        return {}
    choice = members.get("tool_choice")
    return {"tools": tools} if choice is None else {"tools": tools, **_tool_choice(choice)}


def _is_translatable(tool: Mapping[str, Any], dropped: Omissions) -> bool:
    """False for a tool of the provider: refused or dropped by tool type. A search of tools is left out: a chat offers
    all of them."""
    kind = tool.get("type", "custom")
    if str(kind).startswith(_SEARCH):
        dropped.leave_out(f"tools.{_SEARCH}")
        return False
    if kind not in ("custom", None):
        refuse(f"tools.{kind}", dropped)
        return False
    refuse_others(tool, _TOOL, "tools", dropped)
    return True


def _tool(tool: Mapping[str, Any]) -> Json:
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _tool_choice(choice: Mapping[str, Any]) -> Json:
    if choice["type"] == "tool":
        chosen: Json = {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    else:
        chosen = {"tool_choice": _CHOICES[choice["type"]]}
    if choice.get("disable_parallel_tool_use"):
        chosen["parallel_tool_calls"] = False
    return chosen


# --------------------------------------------------------------------------- messages


def _system(members: Mapping[str, Any]) -> list[Json]:
    system = members.get("system")
    return [{"role": "system", "content": _joined(_texts(system))}] if system else []


def _texts(content: str | Sequence[Mapping[str, Any]]) -> list[Json]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{"type": "text", "text": block["text"]} for block in content]


def _joined(parts: list[Json]) -> str | list[Json]:
    """Content as most servers know it: text alone where text is all there is."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _turn(turn: Mapping[str, Any], dropped: Omissions) -> list[Json]:
    role, content = turn["role"], turn.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    content = content or []
    if role == "system":
        return [{"role": role, "content": _joined(_texts(content))}]
    return [_assistant(content, dropped)] if role == "assistant" else _user(content, dropped)


def _user(blocks: Sequence[Mapping[str, Any]], dropped: Omissions) -> list[Json]:
    """Tool results first, as each call waits for a result; then all else."""
    messages, parts = [], []
    for block in blocks:
        if block["type"] == "tool_result":
            result, media = _tool_result(block, dropped)
            messages.append(result)
            parts += media
        else:
            parts += _parts(block, dropped)
    if parts:
        messages.append({"role": "user", "content": _joined(parts)})
    return messages


def _tool_result(block: Mapping[str, Any], dropped: Omissions) -> tuple[Json, list[Json]]:
    """The message with the result; parts that such a message cannot hold."""
    _known(block, dropped)
    content = block.get("content") or ""
    blocks = _texts(content) if isinstance(content, str) else content
    parts = list(chain.from_iterable(_parts(inner, dropped) for inner in blocks))
    texts = [part for part in parts if part["type"] == "text"]
    if block.get("is_error"):
        first = texts.pop(0)["text"] if texts else ""
        texts.insert(0, {"type": "text", "text": f"Error: {first}"})
    result = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _joined(texts) or ""}
    return result, [part for part in parts if part["type"] != "text"]


def _assistant(blocks: Sequence[Mapping[str, Any]], dropped: Omissions) -> Json:
    texts: list[Json] = []
    calls: list[Json] = []
    turn = _Thought()
    for block in blocks:
        kind = _known(block, dropped)
        if kind == "text":
            texts += _texts([block])
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind in ("thinking", "redacted_thinking"):
            turn.add(block)
        elif is_providers(kind):
            texts += _providers(block, dropped)
        else:
            refuse(f"messages.content.{kind}", dropped)
    message: Json = {"role": "assistant", "content": _joined(texts) or (None if calls else "")}
    message |= turn.members()
    if calls:
        message["tool_calls"] = [merged(call, turn.calls.get(call["id"], {})) for call in calls]
    return message


def _call(block: Mapping[str, Any]) -> Json:
    state = block.get(STATE) or {}
    function = {"name": block["name"], "arguments": _encode(as_object(block.get("input"))).decode()}
    call = {"id": block["id"], "type": "function", "function": {**function, **state.get("function", {})}}
    return {**call, **state.get("call", {})}


class _Thought:
    """Reasoning of a turn and the state beside it. `calls`: state by id of the call."""

    def __init__(self) -> None:
        self.calls: dict[str, Json] = {}
        self._texts: list[str] = []
        self._details: list[Json] = []
        self._members: Json = {}

    def add(self, block: Mapping[str, Any]) -> None:
        text, state = str(block.get("thinking") or ""), block.get(STATE)
        self._texts.append(text)
        if state is None:
            if "data" not in block or block["data"]:
                self._details.append(reasoning_detail(block, len(self._details)))
            return
        details = restored(state, text)
        self._texts[-1] = text or details_text(details)
        self._details += details
        self._members = merged(self._members, state.get("message") or {})
        for call_id, each in (state.get("calls") or {}).items():
            found = {**each.get("call", {}), **({"function": each["function"]} if each.get("function") else {})}
            self.calls[call_id] = merged(self.calls.get(call_id, {}), found)

    def members(self) -> Json:
        """Members of the chat's message."""
        thought = "".join(self._texts)
        return {
            **({"reasoning_content": thought} if thought else {}),
            **({"reasoning_details": self._details} if self._details else {}),
            **self._members,
        }


def _providers(block: Mapping[str, Any], dropped: Omissions) -> list[Json]:
    """A block of a provider's own tool as a text."""
    if dropped.drop_known(f"messages.content.{block['type']}") or not (text := as_text(block)):
        return []
    return [{"type": "text", "text": text}]


def _known(block: Mapping[str, Any], dropped: Omissions) -> str:
    """Type of a block, all of whose members can be translated."""
    kind: str = block["type"]
    if block.get("caller") and block["caller"] != _DIRECT:  # called by another tool
        dropped.leave_out(f"messages.content.{kind}.caller")
    refuse_others(block, _BLOCKS.get(kind, block), f"messages.content.{kind}", dropped)
    return kind


def _parts(block: Mapping[str, Any], dropped: Omissions) -> list[Json]:
    """Parts of a chat message for a block of a user's message or a tool's result."""
    kind = _known(block, dropped)
    if kind == "text":
        return _texts([block])
    if kind == "image":
        return _image(block, dropped)
    if kind == "document":
        return _document(block, dropped)
    if is_providers(kind):
        return _providers(block, dropped)
    refuse(f"messages.content.{kind}", dropped)
    return []


def _image(block: Mapping[str, Any], dropped: Omissions) -> list[Json]:
    source = block["source"]
    if source["type"] == "base64":
        url = data_url(source["media_type"], source["data"])
    elif source["type"] == "url":
        url = source["url"]
    else:
        refuse("messages.content.source", dropped, "the file is stored at another provider")
        return []
    return [{"type": "image_url", "image_url": {"url": url}}]


def _document(block: Mapping[str, Any], dropped: Omissions) -> list[Json]:
    """A PDF is a file; a text is a text after its title and context."""
    source, context = block["source"], block.get("context")
    if source["type"] == "base64":
        file = {"filename": block.get("title") or PDF_NAME, "file_data": data_url(source["media_type"], source["data"])}
        return [*(_texts(context) if context else ()), {"type": "file", "file": file}]
    heading = [text for text in (block.get("title"), context) if text]
    if source["type"] == "text":
        return _texts("\n".join([*heading, source["data"]]))
    if source["type"] == "content":
        inner = source["content"]
        blocks = _texts(inner) if isinstance(inner, str) else inner
        return [*_texts("\n".join(heading)) * bool(heading), *chain.from_iterable(_parts(b, dropped) for b in blocks)]
    refuse("messages.content.source", dropped, "a chat holds documents by their bytes alone")
    return []
