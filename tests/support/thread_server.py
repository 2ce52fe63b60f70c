"""A server of Anthropic's Messages that keeps threads, one store for each API key, as Anthropic's API does.

A first turn with tools is answered by a call of the first tool, a turn that ends with its result by a text. `name` is
the host under which the gateway knows the server: a proxy leads there.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.app import Gateway
from tests.support.connect_proxy import ConnectProxy
from tests.support.dialect_strategies import message_events, named_sse
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Received, Script, Upstream, chunk, reply

Json = dict[str, Any]
HOST = "api.anthropic.com"
JSON = "content-type: application/json"


class ThreadServer(Upstream):
    """`kept`: messages by id of the last answer, for each key. `lost`: continuations without a known thread."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, dict[str, list[Json]]] = {}
        self.lost = 0
        self.answered: list[list[Json]] = []  # the whole conversation of each answer

    @property
    def known_as(self) -> str:
        return f"http://{HOST}:{self.url.rpartition(':')[2]}"

    def script(self, received: Received) -> Script:
        if received.target != "/v1/messages":
            return [reply()]
        body, store = json.loads(received.body), self.kept.setdefault(received.headers.get("x-api-key", ""), {})
        thread = body.get("thread") or {}
        before: list[Json] | None = []
        if thread.get("type") == "continue":
            before = store.pop(thread["previous_message_id"], None)
        if before is None:
            self.lost += 1
            return [reply(json.dumps(THREAD_LOST).encode(), "404 Not Found", JSON)]
        conversation = [*before, *body["messages"]]
        self.answered.append(conversation)
        message = self._message(len(self.answered), conversation)
        if thread:
            store[message["id"]] = [*conversation, {"role": "assistant", "content": message["content"]}]
        if body.get("stream"):
            events = b"".join(map(chunk, named_sse(message_events(message))))
            return [STREAM_HEAD + events + LAST_CHUNK]
        return [reply(json.dumps(message).encode(), "200 OK", JSON)]

    def _message(self, number: int, conversation: list[Json]) -> Json:
        last = conversation[-1]["content"]
        is_result = isinstance(last, list) and last[-1]["type"] == "tool_result"
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "weather", "input": {"city": "Ulm"}}
        text = {"type": "text", "text": f"known: {len(conversation)}"}
        return {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": "claude",
            "content": [text] if is_result else [call],
            "stop_reason": "end_turn" if is_result else "tool_use",
            "stop_sequence": None,
            "usage": {"input_tokens": 3, "output_tokens": 9},
        }


THREAD_LOST = {
    "type": "error",
    "error": {
        "type": "not_found_error",
        "message": "No usable Thread state was found for `previous_message_id`.",
        "details": {"error_code": "thread_not_found"},
    },
    "request_id": "req_1",
}


@asynccontextmanager
async def threads_kept(routes: Any = None, **more: Any) -> AsyncIterator[tuple[Gateway, ThreadServer]]:
    """A gateway before Anthropic's own API, with two accounts there. `more`: sections of the configuration."""
    async with ThreadServer() as server, ConnectProxy(hosts={HOST: "127.0.0.1"}) as proxy:
        claude = pool(server.known_as, backend="anthropic", model="claude", proxy=proxy.url, prompt_caching="off")
        del claude["api_key"]
        async with running({"claude": claude | {"api_keys": ["sk-ant-1", "sk-ant-2"]}}, routes, **more) as gateway:
            yield gateway, server
