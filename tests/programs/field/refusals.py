"""Refusals in the words and the envelope of each API (`refusals` of the table)."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.programs.field.rules import Target, Violation, table

_VALUE = re.compile(r"does not support '?([^' ]+)'? with this model")


def refusal(target: Target, found: Violation) -> tuple[int, bytes]:
    """Status and body of the answer to a request that breaks a rule."""
    style = table()["refusals"][target.rule("refusal")]
    status = style.get("status", 400)
    return status, json.dumps(_ENVELOPES[style["envelope"]](target, found, _words(target, style, found))).encode()


def _words(target: Target, style: Any, found: Violation) -> str:
    """The template of the API for a member or a value, else the words of the rule."""
    template = style.get(_form(found))
    if template is None:
        return found.message
    leaf = found.at.rpartition(".")[2]
    camel = re.sub(r"_(.)", lambda match: match[1].upper(), leaf)
    value = _VALUE.search(found.message)
    known = ", ".join(target.rule("efforts", "chat") or ())
    words = {"at": found.at, "leaf": leaf, "camel": camel, "model": target.model, "known": known}
    return str(template).format(**words, value=value[1] if value else "")


def _form(found: Violation) -> str:
    """Name of a template: of a member in a message, a member that is not known or not supported, a value."""
    if found.kind.startswith("messages."):
        return "message_member"
    if found.kind.startswith("member "):
        return "member" if found.code == "unknown_parameter" else "unsupported"
    return "value" if found.kind.startswith("effort ") else ""


def _openai(_: Target, found: Violation, words: str) -> Any:
    return {"error": {"message": words, "type": "invalid_request_error", "param": found.at or None, "code": found.code}}


def _nameless(_: Target, found: Violation, words: str) -> Any:
    """The member stands in the words only."""
    return {"error": {"message": words, "type": "invalid_request_error", "param": None, "code": found.code}}


def _anthropic(_: Target, found: Violation, words: str) -> Any:
    error = {"type": "invalid_request_error", "message": words}
    return {"type": "error", "error": error, "request_id": "req_field"}


def _gemini(_: Target, found: Violation, words: str) -> Any:
    details = {
        "@type": "type.googleapis.com/google.rpc.BadRequest",
        "fieldViolations": [{"field": found.at, "description": words}],
    }
    return [{"error": {"code": 400, "message": words, "status": "INVALID_ARGUMENT", "details": [details]}}]


def _mistral(_: Target, found: Violation, words: str) -> Any:
    path = [int(part) if part.isdigit() else part for part in re.split(r"[.\[\]]+", found.at) if part]
    kind = "extra_forbidden" if found.kind.startswith(("member ", "messages.")) else "value_error"
    detail = {"type": kind, "loc": ["body", *path], "msg": words, "input": None}
    return {"object": "error", "message": {"detail": [detail]}, "type": "invalid_request_error", "code": None}


def _xai(_: Target, found: Violation, words: str) -> Any:
    return {"code": "Client specified an invalid argument", "error": words}


def _openrouter(target: Target, found: Violation, words: str) -> Any:
    raw = json.dumps({"error": {"message": words, "code": 400}})
    metadata = {"raw": raw, "provider_name": target.model.partition("/")[0]}
    return {"error": {"message": "Provider returned error", "code": 400, "metadata": metadata}}


def _plain(_: Target, found: Violation, words: str) -> Any:
    return {"object": "error", "message": words, "type": "BadRequestError", "param": found.at or None, "code": 400}


_ENVELOPES = {
    "openai": _openai,
    "nameless": _nameless,
    "anthropic": _anthropic,
    "gemini": _gemini,
    "mistral": _mistral,
    "xai": _xai,
    "openrouter": _openrouter,
    "plain": _plain,
}
