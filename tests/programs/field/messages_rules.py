"""Verifies a request of Anthropic's Messages, as the API of a target does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.programs.field import shared_rules as shared
from tests.programs.field.chat_rules import alternation
from tests.programs.field.rules import Target, Violation
from tests.programs.field.schema_rules import verify_schema
from tests.programs.field.shared_rules import Body

_BLOCKS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"text", "citations"}),
    "image": frozenset({"source", "transformations"}),
    "document": frozenset({"source", "title", "context", "citations"}),
    "tool_use": frozenset({"id", "name", "input", "caller"}),
    "server_tool_use": frozenset({"id", "name", "input", "caller"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error"}),
    "web_search_tool_result": frozenset({"tool_use_id", "content", "caller"}),
    "tool_search_tool_result": frozenset({"tool_use_id", "content"}),
    "search_result": frozenset({"source", "title", "content", "citations"}),
    "tool_reference": frozenset({"tool_name"}),
    "thinking": frozenset({"thinking", "signature"}),
    "redacted_thinking": frozenset({"data"}),
    "mid_conv_system": frozenset({"content"}),
}


def thinking_of(target: Target, body: Body) -> bool:
    return shared.thinks(target, body, None, body.get("thinking"))


def verify_messages(target: Target, body: Body) -> list[Violation]:
    """Every rule that the request breaks; signatures are verified in `state.py`."""
    thinking = thinking_of(target, body)
    found = [*_messages(target, body["messages"]), *_pairs(target, body["messages"]), *_blocks(target, body)]
    if target.api != "anthropic":
        return [*found, *alternation(target, [*_as_chat(body)])]
    if type(body.get("max_tokens")) is not int:
        found.append(Violation("no max_tokens", "max_tokens", "max_tokens: Field required"))
    return [
        *found,
        *shared.unknown_members(target, "messages", body),
        *shared.sampling(target, body, thinking),
        *_thinking(target, body, thinking),
        *_tools(target, body, thinking),
        *_structured(target, body),
        *_prefill(target, body),
        *shared.stops(target, body.get("stop_sequences"), "stop_sequences"),
        *shared.longest_output(target, body, ("max_tokens",)),
    ]


def _as_chat(body: Body) -> Iterator[Mapping[str, Any]]:
    """Roles of the chat that a server of engines makes of it."""
    for turn in body["messages"]:
        kinds = {block.get("type") for block in _listed(turn.get("content"))}
        if "tool_result" in kinds:
            yield {"role": "tool"}
        if kinds - {"tool_result"}:
            yield {"role": turn["role"], "tool_calls": ["..."] * ("tool_use" in kinds)}


def _thinking(target: Target, body: Body, thinking: bool) -> Iterator[Violation]:
    given, effort = body.get("thinking"), (body.get("output_config") or {}).get("effort")
    kind = given.get("type") if isinstance(given, dict) else None
    if kind is not None and kind not in target.rule("thinking"):
        message = f'"thinking.type.{kind}" is not supported for this model.'
        if kind == "enabled":
            message += ' Use "thinking.type.adaptive" and "output_config.effort" to control thinking behavior.'
        yield Violation(f"thinking {kind}", "thinking.type", message)
    elif kind == "enabled":
        budget = given.get("budget_tokens")
        if type(budget) is not int or budget < target.rule("least_budget"):
            yield Violation(
                "budget of thinking", "thinking.budget_tokens", "Input should be greater than or equal to 1024"
            )
        elif budget >= body.get("max_tokens", 0):
            yield Violation(
                "budget above max_tokens", "thinking", "`max_tokens` must be greater than `thinking.budget_tokens`"
            )
    if effort is not None and not target.rule("efforts", "messages"):
        yield Violation("member of effort", "output_config.effort", "This model does not support the effort parameter.")
    else:
        yield from shared.efforts(target, "messages", effort, "output_config.effort")
    if (
        kind in ("disabled", "between_tools")
        and target.rule("off_efforts")
        and effort not in (None, *target.rule("off_efforts"))
    ):
        message = f"output_config.effort '{effort}' is not supported when thinking is disabled on this model."
        yield Violation("effort beside disabled thinking", "output_config.effort", message)
    if thinking and target.rule("sampling") == "one":
        for name, least in (("temperature", 1), ("top_p", 0.95), ("top_k", None)):
            value = body.get(name)
            if value is not None and (least is None or value < least):
                yield Violation(
                    f"{name} while thinking", name, f"`{name}` may only be set to 1 when thinking is enabled."
                )


def _tools(target: Target, body: Body, thinking: bool) -> Iterator[Violation]:
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if choice is not None and not tools and choice.get("type") != "none":
        yield Violation(
            "tool_choice without tools", "tool_choice", "tool_choice may only be specified while providing tools."
        )
    yield from shared.names(target, [t["name"] for t in tools if "name" in t], "tools.0.custom.name")
    for number, tool in enumerate(tools):
        if tool.get("type", "custom") == "custom":
            at, strict = f"tools.{number}.custom.input_schema", tool.get("strict") is True
            yield from _once(verify_schema("anthropic", tool.get("input_schema"), at, answer=strict))
            known = {"type", "name", "description", "input_schema", "strict", "cache_control", "defer_loading"}
            known |= {"eager_input_streaming", "allowed_callers", "input_examples"}
            for name in sorted(tool.keys() - known):
                yield Violation(f"tools.{name}", f"tools.{number}.custom.{name}", "Extra inputs are not permitted")
    if tools and all(tool.get("defer_loading") for tool in tools):
        yield Violation("all tools deferred", "tools", "At least one tool must have defer_loading=false")
    forced = choice is not None and choice.get("type") in ("any", "tool")
    if forced and choice.get("type") == "tool" and choice.get("name") not in [tool.get("name") for tool in tools]:
        yield Violation("tool_choice of an absent tool", "tool_choice.name", "Tool not found in provided tools")
    if forced and target.rule("forced") == "refused":
        message = 'tool_choice: type "tool" and "any" are not supported for this model'
        yield Violation("tool_choice forced", "tool_choice", message, None, True)
    if forced and thinking and target.rule("forced") == "thinking":
        message = "Thinking may not be enabled when tool_choice forces tool use."
        yield Violation("thinking beside a forced tool", "thinking", message)


def _structured(target: Target, body: Body) -> Iterator[Violation]:
    shape = (body.get("output_config") or {}).get("format")
    if isinstance(shape, dict) and shape.get("type") == "json_schema":
        yield from _once(verify_schema("anthropic", shape.get("schema"), "output_config.format.schema", answer=True))


def _once(found: Sequence[Violation]) -> list[Violation]:
    return list({violation.kind: violation for violation in reversed(found)}.values())


def _prefill(target: Target, body: Body) -> Iterator[Violation]:
    last = body["messages"][-1] if body["messages"] else {}
    if last.get("role") == "assistant":
        if target.rule("prefill") == "refused":
            message = (
                "This model does not support assistant message prefill. The conversation must end with a user message."
            )
            yield Violation("prefill", "messages", message)
        elif isinstance(last.get("content"), str) and last["content"].rstrip() != last["content"]:
            yield Violation(
                "trailing white space", "messages", "final assistant content cannot end with trailing whitespace"
            )


# --------------------------------------------------------------------------- messages


def _messages(target: Target, messages: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    for at, message in enumerate(messages):
        role = message.get("role")
        if role == "system" and at and target.rule("middle_system") is not False:
            role = "user"
        if role not in ("user", "assistant"):
            yield Violation(
                f"role {role}",
                f"messages.{at}.role",
                f'Unexpected role "{role}". Allowed roles are "user" or "assistant".',
            )
        for name in sorted(message.keys() - {"role", "content"}):
            yield Violation(
                f"messages.{name}", f"messages.{at}.{name}", f"messages.{at}.{name}: Extra inputs are not permitted"
            )
        if not message.get("content"):
            yield Violation(
                "empty content", f"messages.{at}", f"messages.{at}: all messages must have non-empty content"
            )
    if messages and messages[0].get("role") != "user":
        yield Violation("first message", "messages.0", 'messages: first message must use the "user" role')


def _listed(content: Any) -> list[Mapping[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _blocks(target: Target, body: Body) -> Iterator[Violation]:
    marks = sum(1 for tool in body.get("tools") or () if tool.get("cache_control"))
    places = [("system", _listed(body["system"]))] if body.get("system") else []
    places += [(f"messages.{at}.content", _listed(each.get("content"))) for at, each in enumerate(body["messages"])]
    for path, blocks in places:
        for number, block in enumerate(blocks):
            marks += bool(block.get("cache_control"))
            yield from _block(target, block, f"{path}.{number}")
            if block.get("type") == "tool_result" and isinstance(block.get("content"), list):
                for inner, nested in enumerate(block["content"]):
                    yield from _block(target, nested, f"{path}.{number}.tool_result.content.{inner}")
    if marks > (target.rule("cache_controls") or 1 << 20):
        yield Violation(
            "number of cache marks",
            "cache_control",
            f"A maximum of 4 blocks with cache_control may be provided. Found {marks}.",
        )


def _block(target: Target, block: Mapping[str, Any], at: str) -> Iterator[Violation]:
    kind = str(block.get("type"))
    known = _BLOCKS.get(kind)
    if known is None or kind not in (target.rule("blocks") or _BLOCKS):
        yield Violation(
            f"block {kind}", at, f"{at}: Input tag '{kind}' found using 'type' does not match any of the expected tags"
        )
        return
    for name in sorted(block.keys() - known - {"type", "cache_control"}):
        yield Violation(
            f"messages.content.{kind}.{name}",
            f"{at}.{kind}.{name}",
            f"{at}.{kind}.{name}: Extra inputs are not permitted",
        )
    if target.api == "anthropic" and kind == "text" and not str(block.get("text") or "").strip():
        yield Violation("empty text block", at, f"{at}: text content blocks must be non-empty")
    if kind == "tool_use" and not isinstance(block.get("input"), dict):
        yield Violation("input that is no object", at, f"{at}.tool_use.input: Input should be a valid dictionary")
    if kind == "image" and block["source"].get("type") == "base64":
        media = target.rule("media")
        if media and block["source"].get("media_type") not in media:
            yield Violation(
                "media type of an image", at, f"{at}.image.source.base64.media_type: Input should be {media}"
            )


# --------------------------------------------------------------------------- calls and results


def _pairs(target: Target, messages: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    seen: set[str] = set()
    waiting: list[str] = []
    for at, message in enumerate(messages):
        blocks = _listed(message.get("content"))
        results = [b["tool_use_id"] for b in blocks if b.get("type") == "tool_result"]
        lost = [identity for identity in waiting if identity not in results]
        if lost:
            text = f"messages.{at - 1}: `tool_use` ids without `tool_result` blocks immediately after: {lost[0]}."
            yield Violation("call without its result", f"messages.{at}", text)
        if [identity for identity in results if identity not in waiting]:
            text = f"messages.{at}.content.0: unexpected `tool_use_id` found in `tool_result` blocks"
            yield Violation("result without its call", f"messages.{at}", text)
        calls = [b["id"] for b in blocks if b.get("type") == "tool_use"]
        for identity in calls:
            if not shared.fits(identity, target.rule("call_id", "messages")):
                text = f"messages.{at}.content.1.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'"
                yield Violation("id of a call", f"messages.{at}", text)
        if target.rule("unique_ids") and (seen & {*calls} or len({*calls}) < len(calls)):
            yield Violation("ids of calls are not unique", f"messages.{at}", "`tool_use` ids must be unique")
        seen |= {*calls}
        waiting = calls
    if waiting:
        yield Violation("call without its result", "messages", "`tool_use` ids were found without `tool_result` blocks")
