"""The members that Open Responses requires of a response, with their types (openresponses.org, version 2026-04-24)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.support.dialogues import Json

_NUMBER, _COUNT, _NAME = (int, float), (int,), (str,)
_NULL = (type(None),)
_REQUIRED: Mapping[str, tuple[type, ...]] = {
    "id": _NAME,
    "object": _NAME,
    "created_at": _COUNT,
    "completed_at": _COUNT + _NULL,
    "status": _NAME,
    "incomplete_details": (dict, *_NULL),
    "model": _NAME,
    "previous_response_id": _NAME + _NULL,
    "instructions": _NAME + _NULL,
    "output": (list,),
    "error": (dict, *_NULL),
    "tools": (list,),
    "tool_choice": (str, dict),
    "truncation": _NAME,
    "parallel_tool_calls": (bool,),
    "text": (dict,),
    "top_p": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "top_logprobs": _COUNT,
    "temperature": _NUMBER,
    "reasoning": (dict, *_NULL),
    "usage": (dict, *_NULL),
    "max_output_tokens": _COUNT + _NULL,
    "max_tool_calls": _COUNT + _NULL,
    "store": (bool,),
    "background": (bool,),
    "service_tier": _NAME,
    "metadata": (dict,),
    "safety_identifier": _NAME + _NULL,
    "prompt_cache_key": _NAME + _NULL,
}
_WITHIN = {"reasoning": ("effort", "summary"), "text": ("format",)}
_OF_A_FUNCTION = ("name", "description", "parameters", "strict")


def faults(response: Json) -> list[str]:
    """Members that are absent or of another type."""
    wrong = [name for name, types in _REQUIRED.items() if name not in response or type(response[name]) not in types]
    for name, members in _WITHIN.items():
        wrong += _missing(name, response.get(name), members)
    for tool in response.get("tools") or []:
        wrong += _missing("tools", tool, _OF_A_FUNCTION if tool.get("type") == "function" else ())
    return wrong


def _missing(name: str, found: Json | None, members: Iterable[str]) -> list[str]:
    return [] if found is None else [f"{name}.{member}" for member in members if member not in found]
