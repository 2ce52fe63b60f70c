"""A mock provider with vLLM's paths: a model, an answer of 60 words, and the faults of FailoverBench.

The answer is the same for every model: an answer begun by a provider and continued by the next can be compared.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.support.fault_proxy import reset

TOKENS = [f"word{number:02d} " for number in range(60)]
ANSWER = "".join(TOKENS)
PROMPT = 10  # tokens of every prompt
GAP = 0.005  # s between two tokens
IDLE = 'vllm:num_requests_running{model_name="m"} 0.0\nvllm:num_requests_waiting{model_name="m"} 0.0\n'


@dataclass(frozen=True)
class ProviderFault:
    """All off by default. Token numbers count from 0."""

    status: int | None = None  # an error reply ...
    code: str | None = None  # ... with this code
    retry_after: Callable[[], str] | None = None  # value at the time of the reply
    once: bool = False  # to the first request only
    reset: bool = False  # a RST before the head
    silent: bool = False  # no reply
    first_token: float = 0.0  # s from the head to the first token
    cut_after: int | None = None  # a RST after so many tokens
    stall_after: int | None = None  # silence for `stall` s after so many tokens
    stall: float = 30.0
    garbage_at: int | None = None  # invalid JSON before this token
    no_done: bool = False
    rejects_prefill: bool = False  # 400 where the last message is the assistant's
    begins_anew: bool = False  # an unfinished answer is a message of the prompt, and not continued


class Provider:
    """An async context manager; `calls` are the bodies of requests."""

    def __init__(
        self, model: str, fault: ProviderFault = ProviderFault(), host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._where = host, port
        self.model, self.fault = model, fault
        self.on_call: Callable[[], None] = lambda: None
        self.calls: list[dict[str, Any]] = []
        self.called_at: list[float] = []
        self.url = ""

    async def __aenter__(self) -> Provider:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, *self._where)
        await site.start()
        self.url = f"http://{self._where[0]}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, http: web.Request) -> web.Response:
        return web.Response(text=IDLE)

    async def _tokenize(self, http: web.Request) -> web.Response:
        """A token a word of a text; PROMPT of any messages."""
        body = await http.json()
        return web.json_response({"count": PROMPT if "messages" in body else len(body["prompt"].split())})

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.calls.append(body)
        self.called_at.append(time.monotonic())
        self.on_call()
        fault = self.fault if len(self.calls) == 1 or not self.fault.once else ProviderFault()
        if fault.silent:
            await asyncio.Event().wait()
        if fault.reset:
            return self._reset(http)
        begun = _begun(body)
        if fault.status is not None or (fault.rejects_prefill and begun):
            return _error(fault)
        known = len(begun.split())  # templates remove the white space at the end
        left = TOKENS if fault.begins_anew else TOKENS[known:]
        usage = _usage(PROMPT + known, len(left))
        if not body.get("stream"):
            return web.json_response(self._whole(left, usage))
        return await self._stream(http, body, left, usage, fault)

    def _reset(self, http: web.Request) -> web.StreamResponse:
        reset(http.transport)
        return web.StreamResponse()

    async def _stream(
        self, http: web.Request, body: dict[str, Any], left: list[str], usage: dict[str, int], fault: ProviderFault
    ) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(http)
        await asyncio.sleep(fault.first_token)
        for number, token in enumerate(left):
            if number == fault.cut_after:
                reset(http.transport)
                return reply
            if number == fault.stall_after:
                await asyncio.sleep(fault.stall)
            if number == fault.garbage_at:
                await reply.write(b'data: {"choices": [{"index": 0, "del\n\n')
            await reply.write(self._event({"content": token}))
            await asyncio.sleep(GAP)
        await reply.write(self._event({}, "stop"))
        if (body.get("stream_options") or {}).get("include_usage"):
            await reply.write(self._event(None, usage=usage))
        if not fault.no_done:
            await reply.write(b"data: [DONE]\n\n")
        return reply

    def _event(self, delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> bytes:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
        event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": self.model, **more}
        return f"data: {json.dumps({**event, 'choices': choices})}\n\n".encode()

    def _whole(self, left: list[str], usage: dict[str, int]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(left)}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        reply = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": self.model}
        return {**reply, "choices": choices, "usage": usage}


def _begun(body: dict[str, Any]) -> str:
    """Beginning of the answer, sent by the caller; else empty."""
    last = body["messages"][-1]
    return str(last.get("content") or "") if last["role"] == "assistant" else ""


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _error(fault: ProviderFault) -> web.Response:
    code = fault.code or ("prefill_not_supported" if fault.rejects_prefill else None)
    error = {"message": f"mock error {code or fault.status}", "type": "invalid_request_error", "code": code}
    headers = {"retry-after": fault.retry_after()} if fault.retry_after else {}
    return web.json_response({"error": error}, status=fault.status or 400, headers=headers)
