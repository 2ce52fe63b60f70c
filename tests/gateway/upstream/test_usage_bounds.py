"""A report of tokens that cannot be is not believed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.interface import Usage
from gateway.upstream.usage_bounds import impossible


def of(usage: Usage, body: dict[str, Any], cap: int | None = None, *, local: bool = True) -> bool:
    sent = json.dumps(body, separators=(",", ":")).encode()
    return bool(impossible(usage, sent, body, cap, received=500, local=local))


def content(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


TEXT = content({"type": "text", "text": "hello"})
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("tokens", "body", "cannot_be"),
    [
        (10, TEXT, False),
        (4_000, TEXT, False),  # of a chat template
        (5_000, TEXT, True),
        (10**12, TEXT, True),
        (5_000, {**TEXT, "tools": TOOLS}, True),
        (200_000, content({"type": "image_url", "image_url": {"url": "https://x/y.png"}}), False),
        (200_000, content({"type": "document", "source": {"type": "file", "file_id": "f"}}), False),
        (200_000, {**TEXT, "previous_response_id": "resp_1"}, False),
        (200_000, {**TEXT, "tools": [{"type": "web_search"}]}, False),
        (200_000, {**TEXT, "tools": [{"type": "web_search_20260209", "name": "web_search"}]}, False),
        (10**12, {**TEXT, "previous_response_id": "resp_1"}, True),
        (50_000, {"prompt": list(range(50_000))}, False),
    ],
)
def test_a_prompt_has_no_more_tokens_than_bytes(tokens: int, body: dict[str, Any], cannot_be: bool) -> None:
    """But for those that a template adds, and of contents that are elsewhere."""
    assert of(Usage(prompt=tokens), body) is cannot_be


@pytest.mark.parametrize(
    ("tokens", "body", "cap", "cannot_be"),
    [
        (400, TEXT, None, False),
        (900_000, TEXT, None, False),  # reasoning that is hidden
        (10**12, TEXT, None, True),
        (8_000, {**TEXT, "max_tokens": 9_000}, None, False),
        (8_000, {**TEXT, "max_tokens": 20}, None, True),
        (8_000, {**TEXT, "max_completion_tokens": 20, "n": 500}, None, True),
        (8_000, TEXT, 20, True),
        (8_000, TEXT, 9_000, False),
        (160, {**TEXT, "max_tokens": 20, "n": 8}, None, False),
    ],
)
def test_an_answer_has_no_more_tokens_than_bytes_or_than_were_asked_for(
    tokens: int, body: dict[str, Any], cap: int | None, cannot_be: bool
) -> None:
    assert of(Usage(completion=tokens), body, cap) is cannot_be


def test_a_compaction_may_have_read_and_written_more() -> None:
    long = Usage(prompt=300_000, completion=5_000, compacted=True)
    assert not of(long, {**TEXT, "max_tokens": 20}, local=False)
    assert of(Usage(prompt=10**12, compacted=True), TEXT, local=False)


@pytest.mark.parametrize(
    ("usage", "cannot_be"), [(Usage(10**6, 8000), False), (Usage(10**7), True), (Usage(9, 10**7), True)]
)
def test_a_provider_is_believed_up_to_what_any_model_can(usage: Usage, cannot_be: bool) -> None:
    """It adds instructions and results of its own to a prompt, and its report is its bill."""
    assert of(usage, {**TEXT, "max_tokens": 20}, local=False) is cannot_be
    assert not of(Usage(10**7), {**TEXT, "previous_response_id": "resp_1"}, local=False)
