"""Names of dark zones beside names that resolve at once: a gateway process with a resolver of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support import resolver
from tests.support.resolver import Resolver
from tests.support.served import serving

pytestmark = pytest.mark.skipif(not resolver.possible(), reason="only root can give a process another resolver")

ANSWER = json.dumps(
    {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }
).encode()
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def closing_server() -> AsyncIterator[int]:
    """Answers each request on a connection of its own, so that each resolves the name."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            size = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
            await reader.readexactly(int(size.partition(b":")[2]))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n")
            writer.write(b"content-length: %d\r\n\r\n" % len(ANSWER) + ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def config(path: Path, port: int, dark: list[Any]) -> Path:
    pools = {
        "api": {"backend": "compatible", "model": "m", "endpoints": [f"http://api.localhost:{port}"]},
        "dark": {"backend": "vllm", "model": "m", "endpoints": dark},
    }
    document = {
        "server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "pools": pools,
        "routes": {"chat": {"tiers": ["api"]}, "engines": {"tiers": ["dark"]}},
    }
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("form", ["resolve", "plain"])
async def test_names_that_hang_take_no_other_name_away(form: str, tmp_path: Path) -> None:
    """Eight engines of a dark zone; the API's own name is answered at once, and opens a connection for each request."""
    async with Resolver() as dns, closing_server() as port:
        dns.dark = b"dark"
        urls = [f"http://n{number}.dark.localhost:8000" for number in range(8)]
        dark = [{"url": url, "resolve": "1s"} if form == "resolve" else url for url in urls]
        path = config(tmp_path / "f.yaml", port, dark)
        async with (
            serving(path, prefix=resolver.prefix(tmp_path)) as served,
            aiohttp.ClientSession() as session,
        ):
            statuses = []
            for _ in range(20):
                async with session.post(f"{served.url}/v1/chat/completions", json=CHAT) as reply:
                    statuses.append(reply.status)
                await asyncio.sleep(0.2)
            assert statuses == [200] * 20


async def test_a_name_that_begins_to_hang_is_connected_to_by_its_last_answer(tmp_path: Path) -> None:
    """Its breaker stays closed."""
    async with Resolver() as dns, closing_server() as port:
        path = config(tmp_path / "f.yaml", port, ["http://n1.dark.localhost:8000"])
        async with (
            serving(path, prefix=resolver.prefix(tmp_path)) as served,
            aiohttp.ClientSession() as session,
        ):
            async with session.post(f"{served.url}/v1/chat/completions", json=CHAT) as reply:
                assert reply.status == 200
            dns.dark = b"localhost"
            for _ in range(5):
                async with session.post(f"{served.url}/v1/chat/completions", json=CHAT) as reply:
                    assert reply.status == 200
            async with session.get(f"{served.admin}/fleet") as reply:
                (api,) = [each for each in await reply.json() if each["endpoint"]["pool"] == "api"]
                assert api["breaker"] == "closed"
