"""Descriptions of models: OpenAI's, or Anthropic's for callers that send `anthropic-version`.

A gateway knows no dates of its routes: `created` is 0, and `created_at` the epoch, as Anthropic's API gives an unknown
date (anthropic-python 2.12, types/model_info.py, November 2026).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EPOCH = "1970-01-01T00:00:00Z"

Described = dict[str, object]


def model_list(names: Sequence[str], headers: Mapping[str, str]) -> Described:
    """All on one page."""
    data = [model_object(name, headers) for name in names]
    if not _anthropic(headers):
        return {"object": "list", "data": data}
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def model_object(name: str, headers: Mapping[str, str]) -> Described:
    if not _anthropic(headers):
        return {"id": name, "object": "model", "created": 0, "owned_by": "firsttoken"}
    return {"type": "model", "id": name, "display_name": name, "created_at": EPOCH, "lifecycle": "active"}


def _anthropic(headers: Mapping[str, str]) -> bool:
    return "anthropic-version" in headers
