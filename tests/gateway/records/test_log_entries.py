"""The mended log: lines of the same traffic without breaks."""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

from gateway.records.log_entries import mended

SPAN = 512  # tokens of a landmark


def line(tenant: str, marks: Sequence[int], **before: Any) -> dict[str, Any]:
    """Of a conversation that both callers give the same name."""
    sizes = {"prompt_tokens_reported": len(marks) * SPAN, "cached_tokens_reported": 0}
    link = {"session": "01", "template": "02", "continues": "nothing", "kept_tokens": None, "prefix_break": None}
    prefix = b64encode(array("Q", marks)).decode()
    return {"route": "chat", "tenant": tenant, "prefix": prefix, **sizes, **link, **before}


def broken(tenant: str, marks: Sequence[int]) -> dict[str, Any]:
    """With a break behind the first landmark; three are lost."""
    found = {"class": "uuid", "lost_tokens": 3 * SPAN}
    return line(tenant, marks, continues="conversation", kept_tokens=SPAN, prefix_break=found)


def test_a_mended_prompt_continues_its_own_callers_even_where_another_has_a_conversation_of_that_name() -> None:
    """Names are hashes of what callers send: two may send the same. What one has sent is never in another's cache."""
    rows = [line("a", [1, 2, 3, 4]), line("b", [11, 12, 13, 14]), broken("a", [1, 25, 26, 27, 28])]
    *_, found = mended(rows)
    assert [*array("Q", b64decode(found["prefix"]))] == [1, 2, 3, 4, 28]
    assert (found["kept_tokens"], found["cached_tokens_reported"]) == (4 * SPAN, 3 * SPAN)
