"""Members of a response that repeat its request, or say the same of every response of the gateway.

Open Responses (2026-04-24) asks for all of them, and for numbers and names where OpenAI's API has null or nothing: a
member that the caller has not set has OpenAI's default. `completed_at` is the exception, null in every response: a chat
completion does not say when it ended, and the bytes of an answer do not depend on the gateway's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.translation.reply_members import as_object, as_objects
from backends.translation.translation import Json

_DEFAULTS: Mapping[str, Any] = {
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "prompt_cache_key": None,
    "reasoning": {},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": 1.0,
    "text": {},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
_FIXED: Json = {
    "background": False,
    "completed_at": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "store": False,
}
_REASONING: Json = {"effort": None, "summary": None}
_TEXT: Json = {"format": {"type": "text"}}
_FUNCTION: Json = {"description": None, "parameters": None, "strict": None}


def echoed_members(body: Mapping[str, Any]) -> Json:
    """The members of the response to the request `body`."""
    given = {name: body.get(name) for name in _DEFAULTS}
    echo = {name: _DEFAULTS[name] if value is None else value for name, value in given.items()}
    echo["reasoning"] = {**_REASONING, **as_object(echo["reasoning"])}
    echo["text"] = {**_TEXT, **as_object(echo["text"])}
    echo["tools"] = [_tool(tool) for tool in as_objects(echo["tools"])]
    return echo | _FIXED


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_FUNCTION, **tool} if tool.get("type") == "function" else tool
