"""Tags of requests: those that the operator lists are recorded and counted, and no other text of a caller is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.observe import part_notes
from gateway.observe.record_columns import RECORD
from tests.support.builders import CHAT, conversing, get, last, post
from tests.support.upstream import reply

pytestmark = pytest.mark.virtual_time

USAGE = b'"usage":{"prompt_tokens":7,"completion_tokens":3}'
BODY = b'{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}],' + USAGE + b"}"
WHOLE = [reply(BODY, "200 OK", "content-type: application/json")]
TAGS = ["team-a", "nightly"]
LISTED = {"telemetry": {"access_log": "off", "tags": TAGS}}


@pytest.mark.parametrize(
    ("headers", "metadata", "tags"),
    [
        ([], None, ()),
        (["x-firsttoken-tags: nightly, team-a"], None, ("team-a", "nightly")),
        (["x-litellm-tags: team-a,other"], {"tags": ["nightly", 3, None]}, ("team-a", "nightly")),
        ([], {"tags": ["nightly"]}, ("nightly",)),
        ([], {"tags": "nightly"}, ()),
        ([], {"tags": ["x"] * 64 + ["nightly"]}, ()),
        (["x-firsttoken-tags: CANARY"], {"tags": ["CANARY", "Team-A"], "other": [1]}, ()),
        ([], ["tags"], ()),
    ],
)
async def test_listed_tags_are_recorded_and_counted(headers: list[str], metadata: Any, tags: tuple[str, ...]) -> None:
    """From a header or LiteLLM's member, which goes on to the server as it is."""
    async with conversing(WHOLE, **LISTED) as (gateway, caller, upstream):
        body = CHAT if metadata is None else {**CHAT, "metadata": metadata}
        assert (await caller.whole(post(body, *headers)))[0] == 200
        assert part_notes.TAGS.of(last(gateway)) == tags
        assert RECORD.view(last(gateway))["tags"] == tags
        page = (await get(gateway.admin_url, "/metrics"))[2].decode()
        assert json.loads(upstream.requests[0].body).get("metadata") == metadata
    counted = {tag for tag in TAGS if f'tagged_tokens_total{{tag="{tag}"}} 10.0' in page}
    assert counted == {*tags}
    assert "CANARY" not in page


async def test_without_listed_tags_none_are_read() -> None:
    async with conversing(WHOLE) as (gateway, caller, _):
        await caller.whole(post(CHAT, "x-firsttoken-tags: team-a"))
        assert part_notes.TAGS.of(last(gateway)) == ()
        assert b"team-a" not in (await get(gateway.admin_url, "/metrics"))[2]
