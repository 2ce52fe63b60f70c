"""Judges whole answers by what a caller can see: refusals, answers without output or cut at the limit, JSON against its
schema. On a route with `escalate` one of another pool is preferred to one with a shortcoming.

Rules:
- The judgement is about the answer as the caller would read it, in the caller's dialect.
- An answer of a shape unknown here has no shortcoming, nor has an answer with a tool call, but for its end. A fault of
  the judge finds none either: the answer is the caller's.
- A schema is the caller's: references are never fetched, and patterns and unique items are not checked (a hostile
  schema would take minutes). An answer or schema above 64 KiB, or one that takes longer than 20 ms, is not checked.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from time import monotonic
from typing import Any

import msgspec

from backends.interface import Operation
from gateway.api.inference_request import InferenceRequest
from gateway.core.hooks import NO_HOOKS, Hooks, RoutePlan
from gateway.core.part import Part
from gateway.observe.part_notes import SHORTCOMING
from gateway.runtime import Runtime
from gateway.upstream.routed_request import RoutedRequest

log = logging.getLogger("firsttoken")

CHECKED = 64 * 1024  # bytes of an answer, and of a schema
LONGEST = 0.02  # s of a check


class Escalations(Part):
    """Judges whole answers of routes with `escalate`."""

    def __init__(self, runtime: Runtime) -> None:
        self.extended(runtime)

    def extended(self, runtime: Runtime) -> Runtime:
        """Import the validator of schemas before a Runtime with a use for it is in force: within a request, the import
        would stall the event loop for 0.1 s."""
        if any("invalid_json" in route.escalate for route in runtime.routes.all):
            import_module("jsonschema")
        return runtime

    def on(self, plan: RoutePlan) -> Hooks:
        wanted = plan.route.escalate
        return Hooks(judge=AnswerJudge(wanted)) if wanted else NO_HOOKS


@dataclass(frozen=True, slots=True)
class AnswerJudge:
    """`wanted`: shortcomings for which the route asks another pool."""

    wanted: Collection[str]

    def objection(self, request: InferenceRequest, reply: bytes) -> str:
        return shortcoming(request.operation, request.body, reply, self.wanted)

    def kept(self, routed: RoutedRequest, objection: str) -> None:
        SHORTCOMING.put(routed.timeline.record, objection)


_UNCHECKED = ("pattern", "patternProperties", "format", "uniqueItems", "$schema")
_CUT = {"length", "max_tokens", "max_output_tokens", "model_context_window_exceeded"}
_REFUSED = {"refusal", "content_filter"}
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def shortcoming(operation: Operation, body: Mapping[str, Any], reply: bytes, wanted: Collection[str]) -> str:
    """Return the first of the wanted shortcomings that the reply has, or nothing."""
    try:
        return _first_shortcoming(operation, body, _ANSWERS[operation](_decode(reply)), wanted)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):  # of a shape unknown here
        return ""
    except Exception:
        log.exception("the judge of answers has failed; the answer is kept")
        return ""


class VisibleAnswer(msgspec.Struct):
    """The visible parts of an answer. `ends`: reasons for which it ended; `tools`: output other than text."""

    texts: list[str]
    ends: set[str]
    refused: bool = False
    tools: bool = False


def _first_shortcoming(
    operation: Operation, body: Mapping[str, Any], answer: VisibleAnswer, wanted: Collection[str]
) -> str:
    if "refusal" in wanted and (answer.refused or answer.ends & _REFUSED):
        return "refusal"
    if "length" in wanted and answer.ends & _CUT:
        return "length"
    if answer.tools:
        return ""
    if "empty" in wanted and not any(text.strip() for text in answer.texts):
        return "empty"
    if "invalid_json" not in wanted or (schema := _schema(operation, body)) is None:
        return ""
    return "" if all(_is_valid(text, schema) for text in answer.texts) else "invalid_json"


def _of_chat(reply: Any) -> VisibleAnswer:
    choices = reply["choices"]
    messages = [choice["message"] for choice in choices]
    return VisibleAnswer(
        texts=[message.get("content") or "" for message in messages],
        ends={str(choice.get("finish_reason")) for choice in choices},
        refused=any(message.get("refusal") for message in messages),
        tools=any(message.get("tool_calls") for message in messages),
    )


def _of_messages(reply: Any) -> VisibleAnswer:
    parts = reply["content"]
    text = "".join(part["text"] for part in parts if part["type"] == "text")
    return VisibleAnswer(
        [text], {str(reply.get("stop_reason"))}, tools=any(part["type"] == "tool_use" for part in parts)
    )


def _of_responses(reply: Any) -> VisibleAnswer:
    parts = list(_response_parts(reply["output"]))
    return VisibleAnswer(
        texts=["".join(part["text"] for part in parts if part["type"] == "output_text")],
        ends={str((reply.get("incomplete_details") or {}).get("reason"))},
        refused=any(part["type"] == "refusal" for part in parts),
        tools=any(item["type"].endswith("_call") for item in reply["output"]),
    )


def _response_parts(items: list[Any]) -> Iterator[dict[str, Any]]:
    for item in items:
        if item["type"] == "message":
            yield from item["content"]


_ANSWERS = {Operation.CHAT: _of_chat, Operation.MESSAGES: _of_messages, Operation.RESPONSES: _of_responses}


def _schema(operation: Operation, body: Mapping[str, Any]) -> Any:
    """The schema that the caller has asked for; True: any JSON; None: no JSON was asked for."""
    plain = _decode(_encode({name: body.get(name) for name in ("response_format", "text", "output_config")}))
    if operation is Operation.CHAT:
        wanted = plain["response_format"] or {}
        return (wanted.get("json_schema") or {}).get("schema", True) if "json" in str(wanted.get("type")) else None
    holder = plain["text"] if operation is Operation.RESPONSES else plain["output_config"]
    wanted = (holder or {}).get("format") or {}
    return wanted.get("schema", True) if "json" in str(wanted.get("type")) else None


def _is_valid(text: str, schema: Any) -> bool:
    if len(text) > CHECKED:
        return True
    try:
        value = _decode(text)
    except ValueError:
        return False
    if schema is True or len(_encode(schema)) > CHECKED:
        return True
    import jsonschema  # an extra, and slow to import
    import referencing

    try:
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        keywords = _timed(kind.VALIDATORS, monotonic() + LONGEST)
        timed: Any = jsonschema.validators.extend(kind, keywords)  # type: ignore[no-untyped-call]
        checker = timed(_checked_part(schema), registry=referencing.Registry())  # an empty one fetches nothing
        return bool(checker.is_valid(value))
    except Exception:  # a faulty schema, or a schema too slow to check: left to the engine
        return True


def _timed(keywords: Mapping[str, Any], until: float) -> dict[str, Any]:
    """Keywords that raise once the time is over: references can double the work at each of many levels. A nested
    `$schema` would select keywords without a time."""

    def timed(check: Any) -> Any:
        def checked(*given: Any) -> Any:
            if monotonic() > until:
                raise TimeoutError
            return check(*given)

        return checked

    return {name: timed(check) for name, check in keywords.items()}


def _checked_part(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {name: _checked_part(value) for name, value in schema.items() if name not in _UNCHECKED}
    return [_checked_part(value) for value in schema] if isinstance(schema, list) else schema
