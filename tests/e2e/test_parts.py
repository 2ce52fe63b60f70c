"""A gateway without any part, and with the part of docs/adding-a-part.md."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.config.models import Config
from gateway.config.part_keys import config_of
from gateway.core.part import Part
from gateway.observe.record import RequestOutcome
from gateway.observe.record_columns import RECORD
from gateway.part_list import PARTS
from gateway.wiring import Core
from policies.queue_parts import queue_parts
from tests.support.builders import STREAMED
from tests.support.gateways import document, pool, started
from tests.support.upstream import Upstream, reply

PAGE = Path(__file__).parents[2] / "docs/adding-a-part.md"
HELLO = {"role": "user", "content": "hello"}
UNWELL = reply(b'{"error":{"message":"no"}}', "500 Internal Server Error", "content-type: application/json")


@asynccontextmanager
async def gateway_of(
    parts: Sequence[Callable[[Core], Part]], first: Upstream, second: Upstream, **keys: Any
) -> AsyncIterator[Gateway]:
    tiers = {"chat": {"tiers": ["first", "second"], "ttft": {"budget": "2s"}} | keys}
    kind = config_of(parts)
    config = kind.model_validate(document({"first": pool(first.url), "second": pool(second.url)}, tiers))
    async with started(Gateway(config, parts=parts)) as gateway:
        yield gateway


async def ask(session: aiohttp.ClientSession, gateway: Gateway, messages: int = 1) -> tuple[int, bytes]:
    body = {"model": "chat", "stream": True, "messages": [HELLO] * messages}
    async with session.post(f"{gateway.url}/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.read()


async def admin(session: aiohttp.ClientSession, gateway: Gateway, path: str) -> Any:
    async with session.get(f"{gateway.admin_url}{path}") as answer:
        return await (answer.json() if path != "/metrics" else answer.text())


def test_the_queue_of_a_gateway_has_the_parts_of_the_queue() -> None:
    """Fair shares and batch work; those of a queue that stands in for a failed one too."""
    config = Config.model_validate(document({"first": pool("http://127.0.0.1:9")}, {"chat": {"tiers": ["first"]}}))
    queue = Gateway(config).queue
    wanted = [type(part) for part in queue_parts()]
    assert wanted
    assert [type(part) for part in queue.scheduler.parts] == wanted
    assert [type(part) for part in queue._new_scheduler().parts] == wanted


async def test_a_gateway_without_parts_routes_fails_over_streams_and_records() -> None:
    """The first tier fails: the stream is the second tier's, its words unchanged, and both attempts are in the
    Record."""
    async with Upstream([UNWELL]) as first, Upstream([STREAMED]) as second, aiohttp.ClientSession() as session:
        async with gateway_of((), first, second) as gateway:
            assert gateway.parts == []
            status, streamed = await ask(session, gateway)
            async with session.post(f"{second.url}/v1/chat/completions", json={}) as direct:
                assert (status, streamed) == (200, await direct.read())
            (record,) = await admin(session, gateway, "/requests")
            assert (record["end"], record["route"], len(record["attempts"])) == ("completed", "chat", 2)
            async with session.post(f"{gateway.url}/v1/chat/completions", json={"model": "unknown"}) as refused:
                assert refused.status in (400, 404)
            page = await admin(session, gateway, "/metrics")
            assert "firsttoken_requests_total{" in page
            await gateway.apply_config(gateway.config)
            assert (await ask(session, gateway))[0] == 200
        assert gateway.recorder.recent[-1].end is RequestOutcome.COMPLETED


@pytest.fixture
def columns() -> Iterator[None]:
    """Those of the product, after the test."""
    before = RECORD.all
    yield
    RECORD.all = ()
    RECORD.add(before)


@pytest.mark.usefixtures("columns")
async def test_the_part_of_the_page_refuses_counts_and_reads_what_has_ended() -> None:
    """Beside the parts of the product, and alone."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), namespace)
    for parts in ((*PARTS, namespace["ConversationLimit"]), (namespace["ConversationLimit"],)):
        async with (
            Upstream([UNWELL]) as first,
            Upstream([STREAMED]) as second,
            aiohttp.ClientSession() as session,
            gateway_of(parts, first, second, max_messages=3) as gateway,
        ):
            assert (await ask(session, gateway, 3))[0] == 200
            status, body = await ask(session, gateway, 4)
            assert (status, b"conversation_too_long" in body, len(second.requests)) == (400, True, 1)
            assert [each["messages"] for each in await admin(session, gateway, "/requests")] == [3, 4]
            gateway.recorder.flush()
            page = await admin(session, gateway, "/metrics")
            assert 'conversations_refused_total{route="chat"} 1.0' in page
            assert 'conversations_ended_total{outcome="completed",route="chat"} 1.0' in page
            assert 'conversations_ended_total{outcome="refused",route="chat"} 1.0' in page
