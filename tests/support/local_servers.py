"""Servers of this machine for the tests of `up`: an Ollama, and hostile ones. Real sockets on free ports."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def http_server(*routes: web.RouteDef) -> AsyncIterator[int]:
    """Serves on a free port of 127.0.0.1, which it yields."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def answering(path: str, value: Any) -> web.RouteDef:
    async def answer(http: web.Request) -> web.Response:
        return web.json_response(value)

    return web.get(path, answer)


def models(*names: str, owner: str = "library") -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": owner} for name in names]}


async def chat(http: web.Request) -> web.StreamResponse:
    """Ollama's stream of one word; every model that is asked for exists."""
    asked = await http.json()
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(http)
    for delta, finish in (({"role": "assistant", "content": "hi"}, None), ({"content": ""}, "stop")):
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        event = {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": asked["model"],
            "choices": [choice],
        }
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def ollama(*names: str, loaded: str = "") -> list[web.RouteDef]:
    """An Ollama's answers, as far as the gateway asks."""
    running = {"models": [{"name": loaded, "model": loaded}] if loaded else []}
    return [
        answering("/api/version", {"version": "0.13.1"}),
        answering("/api/ps", running),
        answering("/v1/models", models(*names)),
        web.post("/v1/chat/completions", chat),
    ]
