"""Descriptions of models: OpenAI's, or Anthropic's for callers that send `anthropic-version`.

A gateway knows no dates of its routes: `created` is 0, and `created_at` the epoch, as Anthropic's API gives an unknown
date (anthropic-python 2.12, types/model_info.py, November 2026). A context window has the names that vLLM
(`max_model_len`) and Anthropic (`max_input_tokens`) give it; an unknown one is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

EPOCH = "1970-01-01T00:00:00Z"

Described = dict[str, object]


def model_list(windows: Mapping[str, int | None], headers: Mapping[str, str]) -> Described:
    """All on one page. `windows`: context window by name."""
    data = [model_object(name, window, headers) for name, window in windows.items()]
    if not _anthropic(headers):
        return {"object": "list", "data": data}
    names = list(windows)
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def model_object(name: str, window: int | None, headers: Mapping[str, str]) -> Described:
    if not _anthropic(headers):
        known = {} if window is None else {"max_model_len": window}
        return {"id": name, "object": "model", "created": 0, "owned_by": "firsttoken", **known}
    known = {} if window is None else {"max_input_tokens": window}
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": EPOCH,
        "lifecycle": "active",
        **known,
    }


def _anthropic(headers: Mapping[str, str]) -> bool:
    return "anthropic-version" in headers
