"""Requests of a session return to the same endpoint of an API."""

from __future__ import annotations

import pytest

from tests.support.builders import ANSWER, CHAT, calling, post
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk

pytestmark = pytest.mark.virtual_time

ANSWERED = [STREAM_HEAD + chunk(ANSWER) + LAST_CHUNK]
SESSIONS = 12


async def test_a_session_returns_to_its_endpoint() -> None:
    """By the cache key in the body, and by Claude Code's header; the sessions use both endpoints."""
    async with (
        Upstream(ANSWERED) as one,
        Upstream(ANSWERED) as two,
        running({"api": pool(one.url, two.url)}) as gateway,
        calling(gateway.url) as caller,
    ):
        homes: dict[str, set[str]] = {}
        for number in range(3 * SESSIONS):
            name = f"session-{number % SESSIONS}"
            for body, header in (({"prompt_cache_key": name}, ()), ({}, (f"X-Claude-Code-Session-Id: {name}",))):
                before = len(one.requests)
                await caller.ask(post({**CHAT, **body, "stream": True}, *header))
                await caller.chunks()
                homes.setdefault(name, set()).add("one" if len(one.requests) > before else "two")
    assert {len(found) for found in homes.values()} == {1}
    assert {home for found in homes.values() for home in found} == {"one", "two"}
