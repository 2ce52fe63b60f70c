"""A simulated engine for clients: the rehearsed model behind OpenAI's chat, completions and embeddings, and behind
Anthropic's Messages.

The model's name selects a fault: `limited` answers 429, `down` 503, `flaky` 429 to the first request of a prompt,
`breaks` cuts streams; `windowed` has the context window of a real engine. Streams have the shape of vLLM's; `GET /seen`
shows the engine's requests to a check.
"""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from itertools import count
from struct import pack
from typing import Any

from aiohttp import web

from tests.programs.clients import rehearsed_messages as anthropic
from tests.programs.clients import windowed_model as windowed
from tests.programs.clients.rehearsed_model import Answer, Json, answer, text_of

BLOCK = 16  # words of a block of the prefix cache
DIMENSIONS = 8
FLAKY_WAIT = 1  # s
CUT_AFTER = 3  # words


class RehearsedServer:
    """Serves at `url` between `start()` and `stop()`."""

    def __init__(self) -> None:
        self.url = ""
        self._ids = count(1)
        self._prompts: list[list[str]] = []
        self._failed: set[str] = set()
        self._seen: Json = {"requests": 0, "aborts": 0, "last": {}}
        self._app = web.Application(client_max_size=64 * 2**20, middlewares=[self._faults])
        self._app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.post("/v1/embeddings", self._embeddings),
                web.post("/v1/messages", self._messages),
                web.post("/v1/messages/count_tokens", self._count_tokens),
                web.get("/seen", self._tell),
            ]
        )

    async def start(self) -> None:
        self._runner = web.AppRunner(self._app, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    # ----------------------------------------------------------------------- faults

    @web.middleware
    async def _faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.method == "GET":
            return await handler(request)  # type: ignore[no-any-return]
        body = await request.json()
        self._seen["requests"] += 1
        self._seen["last"] = body
        model = body.get("model")
        if model == "down":
            return _error(request, 503, "the engine is overloaded", "overloaded_error")
        if model == "limited":
            return _error(request, 429, "slow down", "rate_limit_error", {"retry-after": "1"})
        if model == windowed.MODEL and (refusal := windowed.refusal(body)):
            return _error(request, 400, refusal, "BadRequestError")
        if model == "flaky" and self._first(json.dumps(body.get("messages"))):
            return _error(request, 429, "slow down", "rate_limit_error", {"retry-after": str(FLAKY_WAIT)})
        return await handler(request)  # type: ignore[no-any-return]

    def _first(self, prompt: str) -> bool:
        first = prompt not in self._failed
        self._failed.add(prompt)
        return first

    # ----------------------------------------------------------------------- operations

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        said, finish, usage = self._say(body)
        if body.get("stream"):
            return await self._stream(request, body["model"], said.pace, self._chunks(body, said, finish, usage))
        await asyncio.sleep(said.pace * len(said.words))
        message: Json = {"role": "assistant", "content": " ".join(said.words) or None}
        if said.reasoning:
            message["reasoning"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [call for call, _ in self._tool_calls(said)]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return web.json_response({**self._envelope(body, "chat.completion"), "choices": [choice], "usage": usage})

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        try:
            said, finish, usage = self._say(anthropic.as_chat(body), body)
        except (anthropic.RefusedError, KeyError, TypeError) as refusal:
            return _error(request, 400, f"refused by the engine: {refusal!r}", "invalid_request_error")
        reply = next(self._ids), body["model"], said, finish, usage
        if body.get("stream"):
            events = (b"event: %b\n%b" % (e["type"].encode(), _event(e)) for e in anthropic.events(*reply))
            return await self._stream(request, body["model"], said.pace, events)
        await asyncio.sleep(said.pace * len(said.words))
        return web.json_response(anthropic.message(*reply))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"input_tokens": len(_prompt(anthropic.as_chat({"max_tokens": 1, **body}), body))})

    def _say(self, body: Json, sent: Json | None = None) -> tuple[Answer, str, Json]:
        """The answer to a chat, with finish_reason and usage. `sent`: the request that the chat was made of."""
        said = answer(body)
        words = [word for word in said.text.split(" ") if word]  # lines stay
        said.words.extend(words[: body.get("max_completion_tokens") or body.get("max_tokens")])
        finish = "length" if len(said.words) < len(words) else said.finish
        return said, finish, self._usage(_prompt(body, sent), said)

    async def _stream(
        self, request: web.Request, model: str, pace: float, events: Iterator[bytes]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number, event in enumerate(events):
                await response.write(event)
                await asyncio.sleep(pace)
                if model == "breaks" and number == CUT_AFTER and request.transport is not None:
                    request.transport.abort()
        except ConnectionError:  # the caller left, or this stream was cut
            self._seen["aborts"] += model != "breaks"
        except asyncio.CancelledError:
            self._seen["aborts"] += model != "breaks"
            raise
        return response

    def _chunks(self, body: Json, said: Answer, finish: str, usage: Json) -> Iterator[bytes]:
        envelope = self._envelope(body, "chat.completion.chunk")
        for delta in self._deltas(said):
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            yield _event({**envelope, "choices": [choice]})
        ending = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish}
        yield _event({**envelope, "choices": [ending]})
        if (body.get("stream_options") or {}).get("include_usage"):
            yield _event({**envelope, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    async def _completion(self, request: web.Request) -> web.Response:
        body = await request.json()
        said = Answer(text="there was a gateway.", words=["there", "was", "a", "gateway."])
        choice = {"index": 0, "text": " ".join(said.words), "logprobs": None, "finish_reason": "stop"}
        usage = self._usage(str(body["prompt"]).split(), said)
        return web.json_response({**self._envelope(body, "text_completion"), "choices": [choice], "usage": usage})

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = await request.json()
        given = body["input"]
        texts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        data = [_embedding(i, text, body) for i, text in enumerate(texts)]
        tokens = sum(len(str(text).split()) for text in texts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return web.json_response({"object": "list", "data": data, "model": body["model"], "usage": usage})

    async def _tell(self, request: web.Request) -> web.Response:
        return web.json_response(self._seen)

    # ----------------------------------------------------------------------- parts of an answer

    def _envelope(self, body: Json, kind: str) -> Json:
        return {
            "id": f"chatcmpl-{next(self._ids)}",
            "object": kind,
            "created": int(time.time()),
            "model": body["model"],
        }

    def _usage(self, prompt: list[str], said: Answer) -> Json:
        """Words are tokens. Cached: the longest common beginning with an earlier prompt, in whole blocks."""
        cached = max((_common(prompt, known) for known in self._prompts), default=0) // BLOCK * BLOCK
        self._prompts.append(prompt)
        calls = sum(len(json.dumps(call.arguments).split()) + 1 for call in said.calls)
        thought = len(said.reasoning.split())
        completion = len(said.words) + calls + thought
        return {
            "prompt_tokens": len(prompt),
            "completion_tokens": completion,
            "total_tokens": len(prompt) + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": thought},
        }

    def _deltas(self, said: Answer) -> Iterator[Json]:
        yield {"role": "assistant", "content": ""}
        for word in said.reasoning.split():
            yield {"reasoning": word + " "}
        for position, word in enumerate(said.words):
            yield {"content": (" " if position else "") + word}
        for number, (call, arguments) in enumerate(self._tool_calls(said)):
            opening = {**call, "function": {**call["function"], "arguments": ""}}
            yield {"tool_calls": [{"index": number, **opening}]}
            for start in range(0, len(arguments), 5):
                yield {"tool_calls": [{"index": number, "function": {"arguments": arguments[start : start + 5]}}]}

    def _tool_calls(self, said: Answer) -> list[tuple[Json, str]]:
        """Tool calls, each also with the bare arguments."""
        found = []
        for call in said.calls:
            arguments = json.dumps(call.arguments)
            function = {"name": call.name, "arguments": arguments}
            found.append(({"id": f"call_{next(self._ids)}", "type": "function", "function": function}, arguments))
        return found


def _prompt(body: Json, sent: Json | None = None) -> list[str]:
    """A windowed model reports and refuses by the same count, of the request as it was sent."""
    if body["model"] == windowed.MODEL:
        return windowed.tokens(sent or body)
    said = [f"{m['role']} {text_of(m.get('content'))}" for m in body["messages"]]
    return f"{json.dumps(body.get('tools') or '')} {' '.join(said)}".split()


def _common(one: list[str], other: list[str]) -> int:
    """Length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _embedding(index: int, text: object, body: Json) -> Json:
    digest = sha256(str(text).encode()).digest()
    vector = [byte / 255 for byte in digest[: body.get("dimensions") or DIMENSIONS]]
    binary = body.get("encoding_format") == "base64"
    value = b64encode(pack(f"<{len(vector)}f", *vector)).decode() if binary else vector
    return {"object": "embedding", "index": index, "embedding": value}


def _event(value: Json) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _error(
    request: web.Request, status: int, message: str, kind: str, headers: dict[str, str] | None = None
) -> web.Response:
    """In the dialect of the path."""
    error: Json = {"error": {"message": message, "type": kind, "param": None, "code": kind}}
    if request.path.startswith("/v1/messages"):
        error = {"type": "error", "error": {"message": message, "type": kind}, "request_id": "req_rehearsed"}
    return web.json_response(error, status=status, headers=headers)
