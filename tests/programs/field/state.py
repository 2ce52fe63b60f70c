"""State that APIs tie to a turn: made, verified and missed.

A seal holds the mark of its turn and a MAC over all that the API binds it to: account, model, and for some models the
prefix before the block. Removing an earlier block is always accepted, so no prefix counts thinking.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.programs.field.answers import MARK
from tests.programs.field.rules import Target, Violation
from tests.programs.field.shared_rules import Body

PLACEHOLDER = "skip_thought_signature_validator"
_ATTRIBUTION = "x-anthropic-billing-header"


def seal(target: Target, mark: str, *bound: str) -> str:
    """A signature: opaque to all but its maker."""
    text = "\0".join((target.api, mark, *bound))
    mac = hmac.new(b"field", text.encode(), hashlib.sha256).hexdigest()
    return f"Ev{mark}{mac}=="


def is_sealed(target: Target, given: Any, *bound: str) -> bool:
    found = MARK.search(given) if isinstance(given, str) else None
    return found is not None and hmac.compare_digest(given, seal(target, found[0], *bound))


# --------------------------------------------------------------------------- Messages


def prefix(target: Target, body: Body, end: int) -> str:
    """Digest of all that stands before a message, if the model binds its thinking to it."""
    if not target.rule("bound"):
        return ""
    messages = [[message["role"], _plain(message.get("content"))] for message in body["messages"][:end]]
    tools = [{k: v for k, v in tool.items() if k != "cache_control"} for tool in body.get("tools") or ()]
    text = json.dumps([_plain(body.get("system") or ""), tools, messages], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(content: Any) -> list[Any]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    kept = []
    for block in blocks:
        if block.get("type") in ("thinking", "redacted_thinking") or _ATTRIBUTION in str(block.get("text", "")):
            continue
        plain = {name: value for name, value in block.items() if name != "cache_control"}
        if isinstance(plain.get("content"), list):
            plain["content"] = _plain(plain["content"])
        kept.append(plain)
    return kept


def _messages(target: Target, body: Body) -> Iterator[Violation]:
    if target.api != "anthropic":
        return
    for at, message in enumerate(body["messages"]):
        for number, block in enumerate(message["content"] if isinstance(message.get("content"), list) else ()):
            path = f"messages.{at}.content.{number}"
            if block.get("type") == "redacted_thinking":
                if not is_sealed(target, block.get("data"), target.model):
                    yield Violation(
                        "foreign redacted_thinking", path, f"{path}: Invalid `data` in `redacted_thinking` block"
                    )
            elif block.get("type") == "thinking":
                yield from _thinking(target, body, block, at, path)


def _thinking(target: Target, body: Body, block: Mapping[str, Any], at: int, path: str) -> Iterator[Violation]:
    given, thought = block.get("signature"), str(block.get("thinking") or "")
    if is_sealed(target, given, target.model, thought, prefix(target, body, at)):
        return
    kind = "foreign signature"
    if target.rule("bound") and str(given).startswith("Ev"):
        found = MARK.search(str(given))
        kind = "signature: prefix altered" if found and found[0] in _own.get(target.name, ()) else kind
    yield Violation(kind, path, f"{path}: Invalid `signature` in `thinking` block")


_own: dict[str, set[str]] = {}  # marks of turns by the model that made them


# --------------------------------------------------------------------------- chat


def _chat(target: Target, body: Body, thinking: bool) -> Iterator[Violation]:
    messages = body["messages"]
    last_user = max((at for at, each in enumerate(messages) if each.get("role") == "user"), default=-1)
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        calls = message.get("tool_calls") or []
        if target.rule("returned") and calls and thinking and not isinstance(message.get("reasoning_content"), str):
            text = f"thinking is enabled but reasoning_content is missing in assistant tool call message at index {at}"
            if target.api == "deepseek":
                text = "The `reasoning_content` in the thinking mode must be passed back to the API."
            yield Violation("reasoning_content missing", f"messages[{at}]", text)
        if target.rule("signature") == "thought_signature":
            yield from _signatures(target, calls, at, at > last_user)
        yield from _details(target, message, at, at > last_user)


def _signatures(target: Target, calls: Sequence[Mapping[str, Any]], at: int, is_latest: bool) -> Iterator[Violation]:
    for number, call in enumerate(calls):
        google = (call.get("extra_content") or {}).get("google") or {}
        given = google.get("thought_signature")
        if given is None:
            if is_latest and number == 0:
                text = "Function call is missing a thought_signature in functionCall parts."
                yield Violation("thought_signature missing", f"messages[{at}].tool_calls[0]", text)
        elif given != PLACEHOLDER and not is_sealed(target, given):
            yield Violation(
                "foreign thought_signature", f"messages[{at}].tool_calls[{number}]", "Thought signature is not valid."
            )


def _details(target: Target, message: Mapping[str, Any], at: int, is_latest: bool) -> Iterator[Violation]:
    if not target.rule("detailed"):
        return
    details = message.get("reasoning_details") or []
    for number, detail in enumerate(details):
        given = detail.get("signature") or detail.get("data")
        if given is None or (given == PLACEHOLDER and target.rule("signature") == "details"):
            continue
        bound = detail.get("id") or "", detail.get("format") or ""
        if not is_sealed(target, given, target.model, *bound):
            path = f"messages[{at}].reasoning_details[{number}]"
            yield Violation("reasoning_details altered or foreign", path, "Provider returned error")
    if target.rule("signature") == "details" and is_latest and message.get("tool_calls") and not details:
        yield Violation("reasoning_details missing", f"messages[{at}]", "missing a thought_signature")


# --------------------------------------------------------------------------- Responses


def _responses(target: Target, items: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    for at, item in enumerate(items):
        given = item.get("encrypted_content")
        if item.get("type") == "reasoning" and given and target.rule("encrypted") and not is_sealed(target, given):
            text = f"The encrypted content for item {item.get('id')} could not be verified."
            yield Violation(
                "foreign encrypted_content", f"input[{at}].encrypted_content", text, "invalid_encrypted_content"
            )


def verify_state(target: Target, dialect: str, body: Body, thinking: bool) -> list[Violation]:
    if dialect == "messages":
        return list(_messages(target, body))
    if dialect == "chat":
        return list(_chat(target, body, thinking))
    items = body.get("input")
    return list(_responses(target, items if isinstance(items, list) else []))


# --------------------------------------------------------------------------- lost state


@dataclass
class Ledger:
    """State that a target has made, by the mark of the turn: a text that has to be in what comes back of that turn."""

    made: dict[str, str] = field(default_factory=dict)

    def note(self, target: Target, mark: str, state: str) -> None:
        self.made[mark] = state
        _own.setdefault(target.name, set()).add(mark)

    def lost(self, dialect: str, body: Body) -> list[str]:
        """Marks of turns in the history whose state is not."""
        turns = _turns_of(dialect, body)
        text = json.dumps(body.get("input") if dialect == "responses" else body.get("messages"), ensure_ascii=False)
        return [
            mark
            for mark in turns
            if mark in self.made and json.dumps(self.made[mark], ensure_ascii=False)[1:-1] not in text
        ]


def _turns_of(dialect: str, body: Body) -> list[str]:
    """Marks of the assistant's turns."""
    found: list[str] = []
    if dialect == "responses":
        given = body.get("input")
        for item in given if isinstance(given, list) else ():
            if item.get("role") == "assistant" or item.get("type") in ("function_call", "custom_tool_call"):
                found += MARK.findall(json.dumps(item))
        return found
    for message in body["messages"]:
        if message.get("role") == "assistant":
            kept = {"tool_calls": message.get("tool_calls"), "content": message.get("content")}
            found += MARK.findall(json.dumps(kept))
    return list(dict.fromkeys(found))
