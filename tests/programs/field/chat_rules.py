"""Verifies a request for chat completions, as the API of a target does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.programs.field import shared_rules as shared
from tests.programs.field.rules import Target, Violation, is_meaning
from tests.programs.field.schema_rules import verify_schema
from tests.programs.field.shared_rules import Body

_FORCED_FORMS = ("required", "any")


def thinking_of(target: Target, body: Body) -> bool:
    switch = body.get("thinking")
    return shared.thinks(target, body, body.get("reasoning_effort"), switch if isinstance(switch, dict) else None)


def verify_chat(target: Target, body: Body) -> list[Violation]:
    """Every rule that the request breaks; the state of turns is verified in `state.py`."""
    thinking = thinking_of(target, body)
    return [
        *shared.unknown_members(target, "chat", body),
        *_limits(target, body),
        *shared.sampling(target, body, thinking),
        *shared.efforts(target, "chat", body.get("reasoning_effort"), "reasoning_effort"),
        *shared.stops(target, body.get("stop"), "stop"),
        *shared.labels(target, body),
        *_switch(target, body),
        *_tools(target, body, thinking),
        *_format(target, body, thinking),
        *_roles(target, body["messages"]),
        *_order(target, body["messages"]),
        *alternation(target, body["messages"]),
        *(violation for at, each in enumerate(body["messages"]) for violation in _message(target, each, at)),
        *_calls(target, body["messages"]),
    ]


def _limits(target: Target, body: Body) -> Iterator[Violation]:
    wanted = target.rule("limit")
    if wanted == "max_completion_tokens" and body.get("max_tokens") is not None:
        message = (
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        )
        yield Violation("member max_tokens", "max_tokens", message, "unsupported_parameter")
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        yield Violation("both limits", "max_tokens", "max_tokens and max_completion_tokens cannot both be set")
    yield from shared.longest_output(target, body, ("max_tokens", "max_completion_tokens"))
    if target.rule("n") == 1 and body.get("n") not in (None, 1):
        yield Violation("n above 1", "n", "'n' : number must be at most 1", None, is_meaning("n"))
    if body.get("stream_options") is not None and not body.get("stream"):
        yield Violation(
            "stream_options without stream", "stream_options", "'stream_options' is only allowed with stream"
        )


def _switch(target: Target, body: Body) -> Iterator[Violation]:
    known, given = target.rule("thinking"), body.get("thinking")
    if known is not None and isinstance(given, dict) and given.get("type") not in known:
        message = f"invalid params, thinking.type must be one of {known} (2013)"
        yield Violation(f"thinking {given.get('type')}", "thinking.type", message)


# --------------------------------------------------------------------------- tools and schemas


def _tools(target: Target, body: Body, thinking: bool) -> Iterator[Violation]:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None and not tools and target.rule("empty_tools") != "taken":
        yield Violation("empty tools", "tools", "[] is too short - 'tools'")
    if not tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if body.get(name) is not None:
                yield Violation(f"{name} without tools", name, f"'{name}' is only allowed when 'tools' are specified.")
        return
    kinds = [tool.get("type") for tool in tools]
    known = target.rule("tool_types") or ["function", "custom"]
    for kind in sorted({str(kind) for kind in kinds} - {*known}):
        message = f"tools[{kinds.index(kind)}].type: unknown variant `{kind}`, expected `function`"
        yield Violation(f"tool of type {kind}", "tools[].type", message)
    yield from shared.names(
        target, [t[t["type"]]["name"] for t in tools if t.get("type") in t], "tools[0].function.name"
    )
    if len(tools) > (target.rule("most_tools") or 1 << 20):
        yield Violation(
            "number of tools", "tools", "array too long", "array_above_max_length", is_meaning("most_tools")
        )
    for number, tool in enumerate(tools):
        function = tool.get("function") or {}
        at = f"tools[{number}].function.parameters"
        yield from _once(
            verify_schema(target.rule("schema"), function.get("parameters"), at, strict=function.get("strict") is True)
        )
    yield from _tools_at(target, body, kinds)
    yield from _choice(target, body, choice, thinking)
    if target.rule("parallel") == "refused" and body.get("parallel_tool_calls") is not None:
        message = "Unsupported parameter: 'parallel_tool_calls' is not supported with this model."
        yield Violation("member parallel_tool_calls", "parallel_tool_calls", message, "unsupported_parameter")


def _tools_at(target: Target, body: Body, kinds: Sequence[Any]) -> Iterator[Violation]:
    rule, effort = target.rule("tools_at"), body.get("reasoning_effort")
    refused = (
        rule == "responses"
        or (rule == "effort none" and effort != "none")
        or (rule == "effort absent or none" and effort not in (None, "none"))
    )
    if refused and "function" in kinds:
        message = (
            f"Function tools with reasoning_effort are not supported for {target.model} in /v1/chat/completions. "
            "To use function tools, use /v1/responses or set reasoning_effort to 'none'."
        )
        yield Violation("function tools over chat", "reasoning_effort", message)


def _choice(target: Target, body: Body, choice: Any, thinking: bool) -> Iterator[Violation]:
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        named = choice[choice["type"]]["name"]
        if named not in [tool[tool["type"]]["name"] for tool in body["tools"] if tool.get("type") in tool]:
            yield Violation(
                "tool_choice of an absent tool", "tool_choice", f"Tool choice '{named}' not found in 'tools'."
            )
    forced = isinstance(choice, dict) or choice in _FORCED_FORMS
    known = target.rule("choices")
    if known is not None and choice is not None and choice not in known:
        means = forced and is_meaning("forced tool_choice")
        yield Violation(f"tool_choice {'forced' if forced else choice}", "tool_choice", "1210", "1210", means)
    elif forced and target.rule("forced") == "refused":
        yield Violation("tool_choice forced", "tool_choice", "tool_choice is not supported", None, True)
    elif forced and target.rule("forced") == "thinking" and thinking:
        message = "Thinking mode does not support this tool_choice"
        yield Violation("tool_choice forced while thinking", "tool_choice", message)


def _format(target: Target, body: Body, thinking: bool) -> Iterator[Violation]:
    given = body.get("response_format")
    if not isinstance(given, dict) or given.get("type") in (None, "text"):
        return
    if target.rule("json_while_thinking") == "refused" and thinking:
        message = "'response_format' json mode is not supported when enable_thinking is true"
        yield Violation("response_format while thinking", "response_format", message)
    if given["type"] == "json_object" and target.rule("json_object") == "refused":
        yield Violation("json_object", "response_format", "Not documented", None, is_meaning("json_object"))
    if given["type"] == "json_schema":
        if target.rule("json_schema") == "refused":
            message = "This response_format type is unavailable now"
            yield Violation("json_schema", "response_format", message, None, is_meaning("json_schema"))
            return
        described = given["json_schema"]
        if not shared.fits(described.get("name"), "[a-zA-Z0-9_-]{1,64}"):
            yield Violation("name of a schema", "response_format.json_schema.name", "Invalid name")
        at, strict = "response_format.json_schema.schema", described.get("strict") is True
        found = verify_schema(target.rule("schema"), described.get("schema"), at, strict=strict, answer=True)
        yield from _once(found)


def _once(found: Sequence[Violation]) -> list[Violation]:
    """The first violation of each kind."""
    return list({violation.kind: violation for violation in reversed(found)}.values())


# --------------------------------------------------------------------------- messages


def _roles(target: Target, messages: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    known = target.rule("roles") or ["system", "developer", "user", "assistant", "tool"]
    for role in sorted({str(each.get("role")) for each in messages} - {*known}):
        yield Violation(f"role {role}", "messages.role", f"Unexpected message role: {role}.")
    systems = [at for at, each in enumerate(messages) if each.get("role") in ("system", "developer")]
    if target.rule("middle_system") is False and any(at != number for number, at in enumerate(systems)):
        yield Violation("system in the middle", "messages", "System message must be at the beginning.")
    if (target.rule("one_system") or target.rule("middle_system") is False) and systems[:2] == [0, 1]:
        yield Violation("two system messages", "messages", "System message must be at the beginning.")
    if target.rule("user_needed") and not any(each.get("role") == "user" for each in messages):
        yield Violation("no user turn", "messages", "1214", "1214")


def _order(target: Target, messages: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    last = messages[-1].get("role") if messages else None
    lasts = target.rule("last_roles")
    if lasts and last not in lasts and not messages[-1].get("prefix"):
        yield Violation(f"last message of the {last}", "messages", f"Expected last role User or Tool, but got {last}")
    for at, (before, each) in enumerate(itertools.pairwise(messages)):
        after = target.rule("after_tool")
        if after and before.get("role") == "tool" and each.get("role") not in after:
            yield Violation(
                "turn after a result", f"messages[{at + 1}]", f"Unexpected role '{each['role']}' after role 'tool'"
            )


def alternation(target: Target, messages: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    """`with tools`: a template that counts results as the user's; `without tools`: neither results nor calls count.
    Results of one turn count once."""
    rule = target.rule("alternation")
    roles = [each["role"] for each in messages[1:]] if rule else []
    if "system" in roles or "developer" in roles:
        yield Violation("system in the middle", "messages", "System message must be at the beginning.")
        return
    if rule == "with tools":
        flat = ["user" if each["role"] == "tool" else each["role"] for each in messages]
        flat = [
            role for at, role in enumerate(flat) if not at or messages[at]["role"] != "tool" or flat[at - 1] != role
        ]
    else:
        flat = [each["role"] for each in messages if each["role"] != "tool" and not each.get("tool_calls")]
    spoken = [role for role in flat if role in ("user", "assistant")] if rule else []
    if any(role != ("assistant" if at % 2 else "user") for at, role in enumerate(spoken)):
        message = "Conversation roles must alternate user/assistant/user/assistant/..."
        yield Violation("two turns of one role", "messages", message)


def _message(target: Target, message: Mapping[str, Any], at: int) -> Iterator[Violation]:
    known = target.rule("message_members")
    for name in sorted(message.keys() - {*known}) if known is not None else ():
        path = f"messages[{at}].{name}"
        yield Violation(f"messages.{name}", path, f"property '{path}' is unsupported")
    for call in message.get("tool_calls") or ():
        for name in sorted(call.keys() - {*(target.rule("tool_members") or call)}):
            yield Violation(f"messages.tool_calls.{name}", f"messages[{at}].tool_calls[0].{name}", f"extra {name}")
        kind = call.get("type", "function")
        if kind not in (target.rule("tool_types") or ["function", "custom"]):
            yield Violation(f"call of type {kind}", f"messages[{at}].tool_calls", f"unknown variant `{kind}`")
        elif kind == "function" and target.rule("arguments_json"):
            yield from _arguments(call, at)
        if call.get("extra_content") is not None and not target.rule("signature") and known is not None:
            path = f"messages[{at}].tool_calls[0].extra_content"
            yield Violation("messages.tool_calls.extra_content", path, f"property '{path}' is unsupported")
    content = message.get("content")
    if (
        message.get("role") == "assistant"
        and not content
        and not message.get("tool_calls")
        and target.rule("empty_turns") != "taken"
        and not (content == "" and target.rule("empty_turns") == "text")
    ):
        yield Violation("empty assistant turn", f"messages[{at}]", "Assistant message must have content or tool_calls")
    if isinstance(content, list):
        yield from _parts(target, content, message.get("role"), at)


def _arguments(call: Mapping[str, Any], at: int) -> Iterator[Violation]:
    try:
        json.loads(call["function"]["arguments"])
    except ValueError:
        message = "invalid params, tool call arguments are not valid json (2013)"
        yield Violation("arguments that are no JSON", f"messages[{at}].tool_calls", message)


def _parts(target: Target, parts: Sequence[Any], role: Any, at: int) -> Iterator[Violation]:
    known = (target.rule("parts") or {}).get("chat")
    allowed = ["thinking"] if target.rule("thoughts") == "parts" else []
    for number, part in enumerate(parts):
        kind, path = part.get("type"), f"messages[{at}].content[{number}]"
        if known is not None and kind not in (*known, *allowed):
            yield Violation(f"content part {kind}", path, f"Invalid value: '{kind}'.", None, kind == "file")
        extra = sorted(part.keys() - {"type", kind}) if target.rule("part_members") else []
        if extra:
            yield Violation(f"messages.content.{extra[0]}", f"{path}.{extra[0]}", f"property '{path}' is unsupported")
        if kind == "text" and part.get("text") == "":
            yield Violation("empty text part", path, "text content blocks must be non-empty")
        if kind == "file" and target.rule("files") == "refused":
            yield Violation("content part file", path, "Unknown part type: file", None, True)
        if kind != "image_url":
            continue
        if role in ("tool", "system"):
            yield Violation(
                "image in a tool's result", path, "Image URLs are only allowed for messages with role 'user'"
            )
        if target.rule("image_parts") == "refused":
            yield Violation("image", path, "image content is not supported", None, is_meaning("images"))
        image = part["image_url"]
        details = target.rule("details", "chat")
        if details is not None and image.get("detail") not in (None, *details):
            yield Violation("image detail", f"{path}.detail", f"Invalid value: '{image['detail']}'.", "invalid_value")
        if target.rule("image_urls") == "refused" and not image["url"].startswith("data:"):
            yield Violation("image by URL", path, "unsupported image url", None, is_meaning("image URL"))


# --------------------------------------------------------------------------- calls and results


def _calls(target: Target, messages: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    """Results directly after the calls, each once; ids in the alphabet of the API."""
    seen: set[str] = set()
    open_calls: list[str] = []
    for at, message in enumerate(messages):
        if message.get("role") == "tool":
            identity = message.get("tool_call_id")
            if identity not in open_calls:
                code = "tool result's tool id not found (2013)" if target.rule("ids_must_exist") else "no such call"
                yield Violation("result without its call", f"messages[{at}]", code)
            else:
                open_calls.remove(identity)
            continue
        if open_calls:
            text = "An assistant message with 'tool_calls' must be followed by tool messages for each."
            yield Violation("call without its result", f"messages[{at}]", text)
            open_calls = []
        for call in message.get("tool_calls") or ():
            identity = call.get("id")
            if not shared.fits(identity, target.rule("call_id", "chat")):
                text = f"Tool call id was {identity} but must be a-z, A-Z, 0-9, with a length of 9."
                yield Violation("id of a call", f"messages[{at}].tool_calls[0].id", text, "string_above_max_length")
            if not identity or identity in open_calls:
                yield Violation("ids of calls are not unique", f"messages[{at}].tool_calls", "duplicate tool call id")
            seen.add(str(identity))
            open_calls.append(str(identity))
    if open_calls:
        yield Violation("call without its result", "messages", "tool_calls must be followed by tool messages")
