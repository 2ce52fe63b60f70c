"""Turns requests for chat completions into requests of Messages.

Members of both dialects as in `messages_to_chat/request.py`; what a model accepts of them is not known here
(`backends.fitting`). Choices where the dialects differ:
- Messages of the roles system and developer at the beginning are the `system`; later ones stay in place.
- A reasoning effort turns on adaptive thinking, which excludes other members in Messages. The effort counts: a
  temperature other than 1, a `top_p` below 0.95 and a `top_k` are left out. Where a tool call is forced, no thinking is
  possible: the effort is sent without it.
- Reasoning of earlier turns is sent where the caller returns the `reasoning_details` with signatures; unsigned thinking
  has no form in Messages, and is left out.
- A turn of the assistant without any content is left out: Messages has none.
- `max_tokens` is the backend's to set where the caller has none.
- A temperature ends at 1; a higher one is 1. An effort below the lowest is the lowest.
- Hints and labels are left out, and noted where their loss may be seen: a `service_tier` without equivalent, the names
  of messages where they tell speakers of one role apart, `metadata`, a `user` beside another `safety_identifier`,
  citations of an earlier answer.
- The name of a JSON schema is a label, and hints about caches have no effect on an answer: both are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from typing import Any

from backends.translation.omissions import Omissions
from backends.translation.request_members import ANY, HINT, LABEL, present, refuse, refuse_others
from backends.translation.tool_arguments import PDF_NAME, as_object, split_data_url
from backends.translation.translation import Json

_SAME = ("model", "stream")
_SAMPLING = ("temperature", "top_p", "top_k")
_READ = (*_SAMPLING, "messages", "max_tokens", "max_completion_tokens", "stop", "tools", "tool_choice")
_OPTIONS = ("parallel_tool_calls", "response_format", "reasoning_effort", "user", "safety_identifier", "service_tier")
_HINTS = ("stream_options", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
_GATEWAYS = ("cache_salt", "priority")  # the gateway's own matter
_KNOWN: Mapping[str, Any] = {
    **dict.fromkeys((*_SAME, *_READ, *_OPTIONS, *_HINTS, *_GATEWAYS), ANY),
    "n": 1,
    "store": False,
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "metadata": LABEL,
    "seed": HINT,
    "frequency_penalty": LABEL,
    "presence_penalty": LABEL,
    "prediction": LABEL,
    "modalities": ["text"],
    "verbosity": ANY,
}
_FUNCTION = dict.fromkeys(("name", "description", "parameters", "strict"), ANY)
_MESSAGE: Mapping[str, Any] = {
    **dict.fromkeys(("role", "name", "content", "tool_calls", "tool_call_id", "refusal"), ANY),
    **dict.fromkeys(("reasoning", "reasoning_content", "reasoning_details"), ANY),
    "annotations": LABEL,
    "audio": None,
    "function_call": None,
}
_IMAGE = {"url": ANY, "detail": ANY}
_PART = dict.fromkeys(("type", "cache_control", "prompt_cache_breakpoint"), ANY)
_PARTS = {kind: {**_PART, kind: ANY} for kind in ("text", "refusal", "image_url", "file")}
_CHOICES = {"auto": "auto", "required": "any", "none": "none"}
_FAST = {"speed": "fast"}
_TIERS = {
    "auto": {"service_tier": "auto"},
    "default": {"service_tier": "standard_only"},
    "fast": _FAST,
    "priority": _FAST,
}
_EFFORTS = frozenset({"low", "medium", "high", "xhigh", "max"})
_THINKING = {"type": "adaptive"}
_LEAST_WHILE_THINKING = {"temperature": 1, "top_p": 0.95}  # in Messages; 1 is the most
_FORCED = ("any", "tool")  # choices beside which Messages has no thinking
_SYSTEM = ("system", "developer")
_NOT_IN_IDS = re.compile(r"[^a-zA-Z0-9_-]")


def chat_to_messages(body: Mapping[str, Any], dropped: Omissions) -> Json:
    members = present(body, dropped)
    refuse_others(members, _KNOWN, "", dropped)
    messages: Json = {name: members[name] for name in _SAME if name in members}
    limits = [members[name] for name in ("max_completion_tokens", "max_tokens") if name in members]
    if limits:
        messages["max_tokens"] = min(limits)
    if members.get("stop"):
        stop = members["stop"]
        messages["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    system = list(takewhile(lambda message: message["role"] in _SYSTEM, members["messages"]))
    if system:
        messages["system"] = _joined(list(chain.from_iterable(_parts(each, dropped) for each in system)))
    messages["messages"] = _turns(members["messages"][len(system) :], dropped)
    messages |= _tools(members, dropped)
    is_forced = messages.get("tool_choice", {}).get("type") in _FORCED
    messages |= _options(members, is_forced, dropped)
    return messages | _sampling(members, messages.get("thinking") == _THINKING, dropped)


def _sampling(members: Mapping[str, Any], is_thinking: bool, dropped: Omissions) -> Json:
    """Sampling members, limited to values that Messages accepts."""
    given = {name: members[name] for name in _SAMPLING if name in members}
    if is_thinking:
        least = _LEAST_WHILE_THINKING
        kept = {name: value for name, value in given.items() if name in least and least[name] <= value <= 1}
        for name in given.keys() - kept.keys():
            dropped.leave_out(name)
        return kept
    if given.get("temperature", 0) > 1:
        dropped.leave_out("temperature")
        given["temperature"] = 1
    return given


def _options(members: Mapping[str, Any], is_forced: bool, dropped: Omissions) -> Json:
    """`is_forced`: the answer has to be a tool call."""
    options: Json = {}
    user = members.get("safety_identifier", members.get("user"))
    if members.get("user", user) != user:
        dropped.leave_out("user")
    if user is not None:
        options["metadata"] = {"user_id": user}
    config = _output_format(members.get("response_format", {"type": "text"}), dropped)
    effort = members.get("reasoning_effort")
    if effort == "minimal":
        dropped.leave_out("reasoning_effort")
        effort = "low"
    if effort == "none":
        options["thinking"] = {"type": "disabled"}
    elif effort in _EFFORTS:
        config["effort"] = effort
        if not is_forced:
            options["thinking"] = dict(_THINKING)
    elif effort is not None:
        refuse("reasoning_effort", dropped, f"Messages has no effort '{effort}'")
    if config:
        options["output_config"] = config
    if members.get("service_tier") in _TIERS:
        options |= _TIERS[members["service_tier"]]
    elif "service_tier" in members:
        dropped.leave_out("service_tier")
    if members.get("verbosity", "medium") != "medium":
        dropped.leave_out("verbosity")
    return options


def _output_format(response_format: Mapping[str, Any], dropped: Omissions) -> Json:
    if response_format["type"] == "text":
        return {}
    if response_format["type"] != "json_schema":
        refuse("response_format", dropped, "Messages has JSON by a schema alone")
        return {}
    described = response_format["json_schema"]
    schema = described["schema"]
    if described.get("description"):
        schema = {"description": described["description"], **schema}
    return {"format": {"type": "json_schema", "schema": schema}}


# --------------------------------------------------------------------------- tools


def _tools(members: Mapping[str, Any], dropped: Omissions) -> Json:
    tools = [_tool(tool, dropped) for tool in members.get("tools", ()) if _is_function(tool, dropped)]
    if not tools:
        return {}
    choice = _tool_choice(members.get("tool_choice"), dropped)
    if members.get("parallel_tool_calls") is False and choice.get("type") != "none":
        choice = {"type": "auto", **choice, "disable_parallel_tool_use": True}
    return {"tools": tools, "tool_choice": choice} if choice else {"tools": tools}


def _is_function(tool: Mapping[str, Any], dropped: Omissions) -> bool:
    if tool["type"] != "function":
        refuse(f"tools.{tool['type']}", dropped)
        return False
    refuse_others(tool, {**_PART, "function": ANY}, "tools", dropped)
    refuse_others(tool["function"], _FUNCTION, "tools.function", dropped)
    return True


def _tool(tool: Mapping[str, Any], dropped: Omissions) -> Json:
    function = tool["function"]
    described = {name: function[name] for name in ("name", "description", "strict") if function.get(name) is not None}
    schema = function.get("parameters") or {"properties": {}}  # a function without parameters
    return {**described, "input_schema": {"type": "object", **schema}, **_cache_control(tool)}


def _tool_choice(choice: Any, dropped: Omissions) -> Json:
    if choice is None:
        return {}
    if isinstance(choice, str):
        return {"type": _CHOICES[choice]}
    if choice["type"] == "function":
        return {"type": "tool", "name": choice["function"]["name"]}
    refuse(f"tool_choice.{choice['type']}", dropped)
    return {}


# --------------------------------------------------------------------------- messages


def _turns(messages: Sequence[Mapping[str, Any]], dropped: Omissions) -> list[Json]:
    """Join tool results and the following user message in one user turn."""
    _leave_out_names(messages, dropped)
    turns: list[Json] = []
    results: list[Json] | None = None  # content of the open turn with tool results
    for message in messages:
        role = message["role"]
        refuse_others(message, _MESSAGE, "messages", dropped)
        if role == "tool":
            if results is None:
                results = []
                turns.append({"role": "user", "content": results})
            results.append(_tool_result(message, dropped))
            continue
        if role == "user" and results is not None:
            results += _parts(message, dropped)
        elif (turn := _turn(role, message, dropped))["content"] or role != "assistant":
            turns.append(turn)
        results = None
    return turns


def _leave_out_names(messages: Sequence[Mapping[str, Any]], dropped: Omissions) -> None:
    """Note dropped `name` members where speakers share a role. Tool messages lose nothing: the call has the name."""
    speakers = {(each["role"], each.get("name")) for each in messages if each["role"] != "tool"}
    if len(speakers) > len({role for role, _ in speakers}):
        dropped.leave_out("messages.name")


def _turn(role: str, message: Mapping[str, Any], dropped: Omissions) -> Json:
    if role == "assistant":
        return {"role": role, "content": _assistant(message, dropped)}
    if role in _SYSTEM:
        return {"role": "system", "content": _joined(_parts(message, dropped))}
    if role != "user":
        refuse(f"messages.role.{role}", dropped)
    return {"role": "user", "content": _joined(_parts(message, dropped))}


def _joined(blocks: list[Json]) -> str | list[Json]:
    plain = len(blocks) == 1 and blocks[0].keys() == {"type", "text"}
    return blocks[0]["text"] if plain else blocks


def _tool_result(message: Mapping[str, Any], dropped: Omissions) -> Json:
    result = {"type": "tool_result", "tool_use_id": _identity(message["tool_call_id"])}
    content = _joined(_parts(message, dropped))
    return {**result, "content": content} if content else result


def _assistant(message: Mapping[str, Any], dropped: Omissions) -> str | list[Json]:
    blocks = [*map(_thought, message.get("reasoning_details") or ())]
    blocks = [block for block in blocks if block] + _parts(message, dropped)
    if message.get("refusal"):
        blocks.append({"type": "text", "text": message["refusal"]})
    for call in message.get("tool_calls") or ():
        if call.get("type", "function") == "function":
            blocks.append(_tool_use(call))
        else:
            refuse(f"messages.tool_calls.{call['type']}", dropped)
    return _joined(blocks) if blocks else ""


def _thought(detail: Mapping[str, Any]) -> Json:
    """A block of thinking with a signature; empty: it has none."""
    if detail.get("type") == "reasoning.text" and detail.get("signature"):
        return {"type": "thinking", "thinking": detail.get("text") or "", "signature": detail["signature"]}
    anthropics = str(detail.get("format") or "").startswith("anthropic")
    if detail.get("type") == "reasoning.encrypted" and anthropics:
        return {"type": "redacted_thinking", "data": detail["data"]}
    return {}


def _tool_use(call: Mapping[str, Any]) -> Json:
    function = call["function"]
    found = as_object(function.get("arguments"))
    return {"type": "tool_use", "id": _identity(call["id"]), "name": function["name"], "input": found}


def _identity(call_id: str) -> str:
    """Id of a tool call in the letters of Messages: some servers write others."""
    return _NOT_IN_IDS.sub("_", call_id)


def _parts(message: Mapping[str, Any], dropped: Omissions) -> list[Json]:
    """Blocks for the content of a message."""
    content = message.get("content")
    if not content:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{**block, **_cache_control(part)} for part in content for block in _part(part, dropped)]


def _cache_control(members: Mapping[str, Any]) -> Json:
    """A caller's mark for the cache, which has the same place in both dialects."""
    return {"cache_control": members["cache_control"]} if members.get("cache_control") else {}


def _part(part: Mapping[str, Any], dropped: Omissions) -> list[Json]:
    kind = part["type"]
    if kind == "thinking":  # of another model, without a signature
        dropped.leave_out("messages.content.thinking")
        return []
    refuse_others(part, _PARTS.get(kind, part), f"messages.content.{kind}", dropped)
    if kind == "text":
        return [{"type": "text", "text": part["text"]}] if part["text"] else []
    if kind == "refusal":
        return [{"type": "text", "text": part["refusal"]}]
    if kind == "image_url":
        return _image(part["image_url"], dropped)
    if kind == "file":
        return _document(part["file"], dropped)
    refuse(f"messages.content.{kind}", dropped)
    return []


def _image(image: Mapping[str, Any], dropped: Omissions) -> list[Json]:
    refuse_others(image, _IMAGE, "messages.content.image_url", dropped)
    if image.get("detail") not in (None, "auto"):
        dropped.leave_out("messages.content.image_url.detail")
    split = split_data_url(image["url"])
    if split is None:
        return [{"type": "image", "source": {"type": "url", "url": image["url"]}}]
    return [{"type": "image", "source": {"type": "base64", "media_type": split[0], "data": split[1]}}]


def _document(file: Mapping[str, Any], dropped: Omissions) -> list[Json]:
    split = split_data_url(file.get("file_data") or "")
    if split is None or split[0] != "application/pdf":
        refuse("messages.content.file", dropped, "Messages has PDF files, by their bytes")
        return []
    source = {"type": "base64", "media_type": split[0], "data": split[1]}
    titled = {"title": file["filename"]} if file.get("filename") not in (None, PDF_NAME) else {}
    return [{"type": "document", "source": source, **titled}]
