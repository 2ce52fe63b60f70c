"""Asks servers for their models and the time to their first token, over HTTP.

Rules:
- An answer is read up to MOST_BYTES and up to a time limit; no redirect is followed, no proxy is used, nothing is
  decompressed.
- A list of models is free. A first token of an API costs: `first_tokens` gets APIs only where somebody has agreed.
- A key is sent to its own API alone, and no text of a server is passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

import aiohttp
from yarl import URL

from backends import catalog
from backends.http.connection_pool import BackendAddress
from backends.interface import Backend, BackendConfig, BackendRequest, HttpCall, Operation
from gateway.cli.up.known_servers import (
    GATEWAY,
    FoundServer,
    KnownServer,
    Reach,
    identified,
    listed_models,
    loaded_model,
)
from gateway.strict_json import BadJson, decode
from gateway.synthetic_request import PING

MOST_BYTES = 4 * 2**20  # of an answer; OpenRouter's list has 1 MB
LOCAL_TIME = 1.5  # s for the answers of a server of this machine
API_TIME = 4.0  # s for a list of models
TOKEN_TIME = 3.0  # s for a first token
ANSWER_TOKENS = 16  # at most, of an answer that is timed
FAILURES = (aiohttp.ClientError, OSError, ValueError)  # of a connection, or of an answer that is no HTTP


class UnreadableAnswer(ValueError):
    """The answer is too large, or no JSON."""


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(trust_env=False, auto_decompress=False, headers={"accept-encoding": "identity"})


async def ask(servers: Iterable[KnownServer]) -> list[FoundServer]:
    """Asks all servers at once. A port of this machine without a listener is left out."""
    async with session() as client:
        found = await asyncio.gather(
            *(_ask_api(client, each) if each.key else _ask_local(client, each) for each in servers)
        )
    return [each for each in found if each is not None]


async def first_tokens(wanted: Sequence[tuple[FoundServer, Sequence[str]]]) -> list[FoundServer]:
    """Times the first token of models, each server by itself and its models one after the other."""
    async with session() as client:
        return list(await asyncio.gather(*(_timed(client, found, models) for found, models in wanted)))


async def _ask_api(client: aiohttp.ClientSession, server: KnownServer) -> FoundServer:
    backend = _backend(server, server.kind, "")
    path = "/v1/models?limit=1000" if server.kind == "anthropic" else "/v1/models"
    try:
        async with asyncio.timeout(API_TIME):
            status, answer = await _get(client, server.url, backend.stored("GET", path))
    except TimeoutError:
        return FoundServer(server, server.kind, Reach.SILENT)
    except UnreadableAnswer:
        return FoundServer(server, server.kind, Reach.UNLISTED)
    except FAILURES:
        return FoundServer(server, server.kind, Reach.DOWN)
    if status in (401, 403):
        return FoundServer(server, server.kind, Reach.REFUSED)
    listed = listed_models(answer) if status == 200 and server.kind != "azure" else None  # Azure lists no deployments
    if listed is None or not listed.names:
        return FoundServer(server, server.kind, Reach.UNLISTED)
    reach = Reach.GATEWAY if listed.owner == GATEWAY else Reach.OK
    return FoundServer(server, server.kind, reach, listed.names, listed.left_out)


async def _ask_local(client: aiohttp.ClientSession, server: KnownServer) -> FoundServer | None:
    """A server is what its list of models says; the other answers tell its kind, and may be missing."""
    others = asyncio.gather(*(_hint(client, server.url, path) for path in ("/api/version", "/info", "/api/ps")))
    try:
        models = await _json(client, server.url, "/v1/models")
    except aiohttp.ClientConnectorError:
        return None
    except TimeoutError:
        return FoundServer(server, "", Reach.SILENT)
    finally:
        version, info, running = await others
    if (listed := listed_models(models)) is None:
        return FoundServer(server, "", Reach.GARBAGE)
    if listed.owner == GATEWAY:
        return FoundServer(server, "", Reach.GATEWAY)
    kind, name = identified(server.port, listed, version, info)
    reach = Reach.OK if listed.names else Reach.EMPTY
    loaded = loaded_model(running, listed.names)
    return FoundServer(replace(server, name=name), kind, reach, listed.names, listed.left_out, loaded, listed.window)


async def _hint(client: aiohttp.ClientSession, url: str, path: str) -> Any:
    """An answer that may be missing: None."""
    try:
        return await _json(client, url, path)
    except (TimeoutError, aiohttp.ClientConnectorError):
        return None


async def _json(client: aiohttp.ClientSession, url: str, path: str) -> Any:
    """The answer of a server of this machine; None: none of use. Raises ClientConnectorError, TimeoutError."""
    try:
        async with asyncio.timeout(LOCAL_TIME):
            status, answer = await _get(client, url, HttpCall("GET", path))
    except (aiohttp.ClientConnectorError, TimeoutError):
        raise
    except FAILURES:
        return None
    return answer if status == 200 else None


async def _get(client: aiohttp.ClientSession, url: str, call: HttpCall) -> tuple[int, Any]:
    """Status and JSON of an answer. Raises UnreadableAnswer and what aiohttp raises."""
    body = bytearray()
    async with client.get(_target(url, call), headers=call.headers, allow_redirects=False) as response:
        if response.status != 200:
            return response.status, None
        async for part in response.content.iter_any():
            body += part
            if len(body) > MOST_BYTES:
                raise UnreadableAnswer
    try:
        return response.status, decode(bytes(body))
    except (BadJson, RecursionError):
        raise UnreadableAnswer from None


async def _timed(client: aiohttp.ClientSession, found: FoundServer, models: Sequence[str]) -> FoundServer:
    ttfts = {model: await _first_token(client, found, model) for model in models}
    return replace(found, ttfts={**found.ttfts, **ttfts})


async def _first_token(client: aiohttp.ClientSession, found: FoundServer, model: str) -> float | None:
    """Seconds to the first token of an answer to one word; None: no token in time."""
    backend = _backend(found.server, found.kind, model)
    operation = Operation.CHAT if Operation.CHAT in backend.native else Operation.MESSAGES
    request = BackendRequest(operation, PING, model, stream=True, max_tokens=ANSWER_TOKENS)
    call, tap, started, size = backend.call(request), backend.tap(request), monotonic(), 0
    try:
        async with (
            asyncio.timeout(TOKEN_TIME),
            client.post(
                _target(found.server.url, call), data=call.body, headers=call.headers, allow_redirects=False
            ) as response,
        ):
            async for part in response.content.iter_any():
                size += len(part)
                if response.status != 200 or size > MOST_BYTES:
                    return None
                if tap.feed(part):
                    return monotonic() - started
    except (TimeoutError, *FAILURES):
        return None
    return None


def _backend(server: KnownServer, kind: str, model: str) -> Backend:
    return catalog.build(BackendConfig(kind, model, server.key))


def _target(url: str, call: HttpCall) -> URL:
    address = BackendAddress.parse(url)
    scheme = "https" if address.tls else "http"
    return URL(f"{scheme}://{address.authority}{address.target(call.path)}", encoded=True)
