"""Fakes of the APIs: verify a request by all rules, and answer as the API does, whole and streamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.programs.field import (
    chat_answers,
    chat_rules,
    messages_answers,
    messages_rules,
    responses_answers,
    responses_rules,
)
from tests.programs.field.answers import Asked, Offered, Turn, new_turn
from tests.programs.field.dice import Dice
from tests.programs.field.rules import Target, Violation
from tests.programs.field.shared_rules import Body
from tests.programs.field.state import Ledger, verify_state

_VERIFIERS = {
    "chat": (chat_rules.verify_chat, chat_rules.thinking_of),
    "messages": (messages_rules.verify_messages, messages_rules.thinking_of),
    "responses": (responses_rules.verify_responses, responses_rules.thinking_of),
}
_WRITERS = {"chat": chat_answers, "messages": messages_answers, "responses": responses_answers}


@dataclass
class Fake:
    """A model at an API, in one conversation. Violations do not end it: later rules would stay unseen."""

    target: Target
    random: Dice
    ledger: Ledger = field(default_factory=Ledger)

    def verify(self, dialect: str, body: Body) -> list[Violation]:
        if dialect not in self.target.rules["speaks"]:
            return [Violation(f"path of {dialect}", "", "Not Found")]
        rules, thinking_of = _VERIFIERS[dialect]
        try:
            thinking = thinking_of(self.target, body)
            return [*rules(self.target, body), *verify_state(self.target, dialect, body, thinking)]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            return [Violation(f"shape: {type(error).__name__} {error}", "", "invalid request")]

    def turn(self, dialect: str, body: Body) -> Turn:
        return new_turn(asked_by(self.target, dialect, body), self.target.rule("call_ids"), self.random)

    def write(self, dialect: str, body: Body, turn: Turn, *, stream: bool) -> bytes:
        """The answer; notes its state in the ledger."""
        writer = _WRITERS[dialect]
        return (
            writer.streamed(self.target, body, turn, self.ledger)
            if stream
            else writer.whole(self.target, body, turn, self.ledger)
        )


def asked_by(target: Target, dialect: str, body: Body) -> Asked:
    thinking = _VERIFIERS[dialect][1](target, body)
    choice = body.get("tool_choice")
    if dialect == "chat":
        shape = body.get("response_format") or {}
        schema = (shape.get("json_schema") or {}).get("schema")
        tools = tuple(_chat_tool(tool) for tool in body.get("tools") or ())
        forced = _named(choice, ("required", "any"))
        return Asked(
            _unless(choice == "none", tools),
            forced,
            body.get("parallel_tool_calls") is not False,
            schema,
            shape.get("type") == "json_object",
            thinking,
        )
    if dialect == "messages":
        schema = ((body.get("output_config") or {}).get("format") or {}).get("schema")
        own = [tool for tool in body.get("tools") or () if tool.get("type", "custom") == "custom"]
        tools = tuple(Offered(tool["name"], tool.get("input_schema") or {}) for tool in own)
        kind = (choice or {}).get("type")
        forced = choice["name"] if kind == "tool" else "" if kind == "any" else None
        parallel = not (choice or {}).get("disable_parallel_tool_use")
        return Asked(_unless(kind == "none", tools), forced, parallel, schema, False, thinking)
    shape = (body.get("text") or {}).get("format") or {}
    tools = tuple(_responses_tools(body.get("tools") or ()))
    forced = _named(choice, ("required",))
    return Asked(
        _unless(choice == "none", tools),
        forced,
        body.get("parallel_tool_calls") is not False,
        shape.get("schema"),
        shape.get("type") == "json_object",
        thinking,
    )


def _unless(is_none: bool, tools: tuple[Offered, ...]) -> tuple[Offered, ...]:
    return () if is_none else tools


def _named(choice: Any, forms: tuple[str, ...]) -> str | None:
    if isinstance(choice, dict):
        inner = choice.get(choice.get("type", "")) or choice
        return inner.get("name") if choice.get("type") in ("function", "custom") else None
    return "" if choice in forms else None


def _chat_tool(tool: Mapping[str, Any]) -> Offered:
    inner = tool.get(tool.get("type", "function")) or {}
    return Offered(inner.get("name", ""), inner.get("parameters") or {}, tool.get("type") == "custom")


def _responses_tools(tools: Any) -> list[Offered]:
    found = []
    for tool in tools:
        if tool.get("type") == "namespace":
            found += [Offered(t["name"], t.get("parameters") or {}, False, tool["name"]) for t in tool["tools"]]
        elif tool.get("type") in ("function", "custom"):
            found.append(Offered(tool["name"], tool.get("parameters") or {}, tool["type"] == "custom"))
    return found
