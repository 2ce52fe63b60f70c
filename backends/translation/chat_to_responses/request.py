"""Turns requests for chat completions into requests of OpenAI's Responses.

- Nothing is stored at the provider unless the caller requests storage: Responses stores by default.
- Members that only chat completions have (`stop`, `logit_bias`, several choices, audio) are refused by name, unless
  the value is the default. Hints (`seed`, penalties, predictions, `top_k`) are left out, and noted.
- The name of a message and citations of an earlier answer are labels: left out, and noted.

Sources: types of openai-python 3.54, platform.openai.com/docs/guides/migrate-to-responses (2026-11).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.translation.omissions import Omissions
from backends.translation.reply_members import as_objects
from backends.translation.request_members import SAME_MEMBERS, Members, PartReader, read_audio, read_refusal
from backends.translation.translation import Json

_ENCRYPTED = "reasoning.encrypted_content"


def chat_to_responses(body: Mapping[str, Any], dropped: Omissions) -> Json:
    members = Members(body, dropped)
    found: Json = {
        **members.take_all(SAME_MEMBERS),
        "input": _input(members),
        "store": members.take("store") is True,
    }
    limits = [members.take(name) for name in ("max_completion_tokens", "max_tokens")]
    if (limit := next((limit for limit in limits if limit is not None), None)) is not None:
        found["max_output_tokens"] = limit
    if (effort := members.take("reasoning_effort")) is not None:
        found["reasoning"] = {"effort": effort}
    # Ask for encrypted reasoning if the provider does not store the response: the next turn needs the reasoning.
    wants_reasoning = not found["store"] and effort != "none"
    found |= _tools(members) | _text(members)
    include = [*_logprobs(members, found), *([_ENCRYPTED] if wants_reasoning else [])]
    if include:
        found["include"] = include
    members.default("n", 1)
    members.default("modalities", ["text"])
    members.default("logit_bias", {})
    for name in ("seed", "prediction", "top_k"):
        members.hint(name)
    for name in ("presence_penalty", "frequency_penalty"):
        members.hint(name, 0)
    _stream_options(members)
    members.close()
    return found


def _stream_options(members: Members) -> None:
    """Usage is written by the translation; padding against eavesdroppers (`include_obfuscation`) is not."""
    if "stream_options" in members:
        options = members.object("stream_options")
        options.take("include_usage")
        options.default("include_obfuscation", False)
        options.close()


# -- items -----------------------------------------------------------------------------------


def _input(members: Members) -> list[Json]:
    items: list[Json] = []
    custom: set[str] = set()  # ids of calls to custom tools
    for message in members.objects("messages"):
        role = message.text("role")
        if role == "assistant":
            items += _turn(message, len(items), custom)
        elif role == "tool":
            items.append(_result(message, custom))
        elif role == "function":
            message.refuse_kind(role)
            continue
        else:
            items.append({"type": "message", "role": role, "content": message.content(_INPUT_PARTS)})
        message.label("name")
        message.label("annotations")
        message.close()
    return items


def _turn(message: Members, place: int, custom: set[str]) -> list[Json]:
    """Items of a turn of the assistant. Ids are the gateway's own: Responses wants some. Encrypted reasoning returns as
    the item that it was."""
    reasoning = [message.take(name) for name in ("reasoning", "reasoning_content")]
    items = _items_kept(message.take("reasoning_details"))
    if not items and (text := next(filter(None, reasoning), None)):
        thoughts = [{"type": "reasoning_text", "text": text}]
        items.append({"type": "reasoning", "id": f"rs_{place}", "summary": [], "content": thoughts})
    content = message.content(_OUTPUT_PARTS)
    refusal = message.take("refusal")
    if content != [] or refusal is not None:
        items.append(_said(content, refusal, place))
    for call in message.objects("tool_calls"):
        items += _call(call, custom)
    return items


def _items_kept(details: Any) -> list[Json]:
    """Items that details of the reasoning hold, whole (`chat_to_responses.answer`)."""
    datas = [each.get("data") for each in as_objects(details)]
    return [dict(data["item"]) for data in datas if isinstance(data, Mapping) and isinstance(data.get("item"), Mapping)]


def _said(content: str | list[Json], refusal: Any, place: int) -> Json:
    if isinstance(content, str) and refusal is None:
        return {"type": "message", "role": "assistant", "content": content}
    parts = content if isinstance(content, list) else [_output_text(content)]
    if refusal is not None:
        parts = [*parts, {"type": "refusal", "refusal": refusal}]
    return {"type": "message", "id": f"msg_{place}", "status": "completed", "role": "assistant", "content": parts}


def _call(call: Members, custom: set[str]) -> list[Json]:
    kind = call.kind() or "function"
    if kind not in ("function", "custom"):
        call.refuse_kind(kind)
        return []
    named, call_id = call.object(kind), call.text("id")
    text = "input" if kind == "custom" else "arguments"
    item = {"type": f"{kind}_call" if kind == "function" else "custom_tool_call", "call_id": call_id}
    item |= {"name": named.text("name"), text: named.text(text)}
    if kind == "custom":
        custom.add(call_id)
    named.close()
    call.label("extra_content")  # state of another model
    call.close()
    return [item]


def _result(message: Members, custom: set[str]) -> Json:
    call_id = message.text("tool_call_id")
    kind = "custom_tool_call_output" if call_id in custom else "function_call_output"
    return {"type": kind, "call_id": call_id, "output": message.content(_TEXTS)}


# -- content ---------------------------------------------------------------------------------


def _read_text(part: Members) -> Json:
    return {"type": "input_text", "text": part.text("text")}


def _read_output_text(part: Members) -> Json:
    return _output_text(part.text("text"))


def _leave_out_thinking(part: Members) -> None:
    """Thinking of another model, which is state of that model alone."""
    part.rest()
    part.dropped.leave_out("messages.content.thinking")


def _read_image(part: Members) -> Json:
    image = part.object("image_url")
    found = {"type": "input_image", "image_url": image.text("url"), "detail": image.take("detail") or "auto"}
    image.close()
    return found


def _read_file(part: Members) -> Json:
    file = part.object("file")
    found = {"type": "input_file", **file.take_all(("file_data", "file_id", "filename"))}
    file.close()
    return found


def _output_text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": []}


_TEXTS: Mapping[str, PartReader] = {"text": _read_text}
_OUTPUT_PARTS: Mapping[str, PartReader] = {
    "text": _read_output_text,
    "refusal": read_refusal,
    "thinking": _leave_out_thinking,
}
_INPUT_PARTS = {**_TEXTS, "image_url": _read_image, "file": _read_file, "input_audio": read_audio}


# -- tools, text -------------------------------------------------------------------------------


def _tools(members: Members) -> Json:
    found: Json = {}
    tools = [read for tool in members.objects("tools") if (read := _tool(tool)) is not None]
    if tools:
        found["tools"] = tools
    choice = members.take("tool_choice")
    if isinstance(choice, str):
        found["tool_choice"] = choice
    elif choice is not None and (read := _tool_choice(Members(choice, members.dropped, "tool_choice"))) is not None:
        found["tool_choice"] = read
    return found


def _tool(tool: Members) -> Json | None:
    kind = tool.kind()
    if kind not in ("function", "custom"):
        tool.refuse_kind(kind)
        return None
    function = tool.object(kind)
    found = {"type": kind, "name": function.text("name"), **function.take_all(("description",))}
    if kind == "function":  # the default of `strict` is false in chat completions, true in Responses
        parameters = function.take("parameters") or {"type": "object", "properties": {}}
        found |= {"parameters": parameters, "strict": function.take("strict") is True}
    elif "format" in function:
        found["format"] = _format(function.object("format"))
    function.close()
    tool.close()
    return found


def _format(shape: Members) -> Json:
    kind = shape.kind()
    grammar = shape.object("grammar").take_all(("definition", "syntax")) if kind == "grammar" else {}
    shape.close()
    return {"type": kind, **grammar}


def _tool_choice(choice: Members) -> Json | None:
    kind = choice.kind()
    if kind == "allowed_tools":
        allowed = choice.object(kind)
        tools = [read for tool in allowed.objects("tools") if (read := _named(tool, tool.kind())) is not None]
        found: Json | None = {"type": kind, "mode": allowed.take("mode"), "tools": tools}
    else:
        found = _named(choice, kind)
    choice.close()
    return found


def _named(tool: Members, kind: str) -> Json | None:
    if kind not in ("function", "custom"):
        tool.refuse_kind(kind)
        return None
    return {"type": kind, "name": tool.object(kind).text("name")}


def _text(members: Members) -> Json:
    text = members.take_all(("verbosity",))
    if (shape := members.take("response_format")) is not None:
        wanted = Members(shape, members.dropped, "response_format")
        kind = wanted.kind()
        schema = wanted.take_all(("json_schema",)).get("json_schema")
        text["format"] = {"type": kind, **(schema if isinstance(schema, dict) else {})}
        wanted.close()
    return {"text": text} if text else {}


def _logprobs(members: Members, found: Json) -> list[str]:
    """Additions that the answer is to have. Sets the number of logprobs in `found`."""
    top = members.take("top_logprobs")
    if top:
        found["top_logprobs"] = top
    return ["message.output_text.logprobs"] if members.take("logprobs") is True or top else []
