"""An HTTP server with the wire format of vLLM (or of an external API), around a simulated engine.

As vLLM under uvicorn: the 200 of a stream is sent before the prompt is computed; a connection idle for 5 s is closed;
a disconnected caller aborts the request in the engine at once.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import ceil
from random import Random
from typing import Any
from uuid import uuid4

import msgspec
from aiohttp import web

from backends.server_profiles import ApiProfile, Profile
from lab.engines.engine import Engine
from lab.engines.engine_events import Refused
from lab.engines.lora_adapters import LoraAdapters
from lab.engines.virtual_engine import HostedApi
from lab.servers.drivers import AnswerWriter, Driver, EngineDriver, Faults, HostedDriver
from lab.servers.reply import ReplyWriter, error_body
from lab.servers.request_parser import ChatBody, CompletionBody, Encode, ParsedRequest, RequestParser
from lab.servers.sleep_mode import SleepMode

# vllm/v1/metrics/loggers.py: buckets of time_to_first_token_seconds
_FINE = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TTFT_BUCKETS = (*_FINE, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TTFT = "vllm:time_to_first_token_seconds"


@dataclass(slots=True)
class AnswerTotals:
    """As vLLM counts: a first token when it comes."""

    ttft_counts: list[int] = field(default_factory=lambda: [0] * (len(_TTFT_BUCKETS) + 1))
    ttft_sum: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0

    def add(self, answer: AnswerWriter) -> None:
        if not answer.tokens:
            return
        self.ttft_counts[bisect_left(_TTFT_BUCKETS, answer.ttft)] += 1
        self.ttft_sum += answer.ttft
        self.prompt_tokens += answer.prompt_tokens
        self.generation_tokens += answer.tokens


class VllmMetrics:
    """The /metrics page, with vLLM 0.32's names. Counts answers, and `live` ones so far; the rest is the engine's."""

    def __init__(self, model: str, started_at: float, ranks: Sequence[int], sleeping: SleepMode) -> None:
        self._others = [f'engine="{rank}",model_name="{model}"' for rank in ranks[1:]]  # idle
        self._labels = f'engine="{ranks[0]}",model_name="{model}"'
        self._sleeping = sleeping
        self._started_at = started_at  # s, wall clock
        self._totals = AnswerTotals()
        self.live: set[AnswerWriter] = set()

    def on_ended(self, answer: AnswerWriter) -> None:
        self.live.discard(answer)
        self._totals.add(answer)

    def page(self, engine: Engine) -> str:
        totals = deepcopy(self._totals)
        for answer in self.live:
            totals.add(answer)
        return "\n".join(self._lines(engine, totals)) + "\n"

    def _lines(self, engine: Engine, totals: AnswerTotals) -> Iterator[str]:
        for name, kind, value in (
            ("num_requests_running", "gauge", engine.running),
            ("num_requests_waiting", "gauge", engine.waiting),
            ("kv_cache_usage_perc", "gauge", engine.kv_usage),
            ("prefix_cache_queries_total", "counter", engine.prefix_queries),
            ("prefix_cache_hits_total", "counter", engine.prefix_hits),
            ("num_preemptions_total", "counter", engine.preemptions),
            ("admission_rejections_total", "counter", engine.rejections),
            ("prompt_tokens_total", "counter", totals.prompt_tokens),
            ("generation_tokens_total", "counter", totals.generation_tokens),
        ):
            yield f"# TYPE vllm:{name} {kind}"
            yield f"vllm:{name}{{{self._labels}}} {float(value)}"
            yield from (f"vllm:{name}{{{labels}}} 0.0" for labels in self._others)
        for labels in (self._labels, *self._others):
            yield from self._sleeping.lines(labels)
        config = f'block_size="{engine.profile.block_size}",enable_prefix_caching="True",engine="0"'
        yield "# TYPE vllm:cache_config_info gauge"
        yield f'vllm:cache_config_info{{{config},num_gpu_blocks="{engine.profile.num_blocks}"}} 1.0'
        if engine.adapters.names:
            running = ",".join(sorted(engine.running_adapters))
            labels = f'max_lora="{engine.adapters.slots}",running_lora_adapters="{running}",waiting_lora_adapters=""'
            yield "# TYPE vllm:lora_requests_info gauge"
            yield f"vllm:lora_requests_info{{{labels}}} {time.time()}"
        yield "# TYPE process_start_time_seconds gauge"
        yield f"process_start_time_seconds {self._started_at}"
        yield f"# TYPE {_TTFT} histogram"
        total = 0
        for bound, answers in zip((*map(str, _TTFT_BUCKETS), "+Inf"), totals.ttft_counts, strict=True):
            total += answers
            yield f'{_TTFT}_bucket{{{self._labels},le="{bound}"}} {float(total)}'
        yield f"{_TTFT}_count{{{self._labels}}} {float(total)}"
        yield f"{_TTFT}_sum{{{self._labels}}} {totals.ttft_sum}"


BACKLOG = 2048  # connections, as uvicorn's
KEEPALIVE = 5.0  # s, VLLM_HTTP_TIMEOUT_KEEP_ALIVE
MAX_BODY = 64 * 2**20  # bytes
RECORDED_REQUESTS = 1000
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """Header names are lower case."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


class SimulatedServer:
    """Serves at `url` from `start()` to `stop()`; both may be repeated."""

    def __init__(
        self,
        profile: Profile,
        *,
        model: str,
        encode: Encode,
        host: str = "127.0.0.1",
        port: int = 0,
        speed: float = 1.0,
        seed: int = 0,
        adapters: LoraAdapters | None = None,
        ranks: Sequence[int] = (0,),
        tokens_per_event: int = 1,
        tells_times: bool = True,
    ) -> None:
        """`ranks`: data-parallel ranks of this server, of which the first one does all work. `tokens_per_event`: of a
        stream; `tells_times`: usage holds the times of the answer (vLLM --enable-per-request-metrics)."""
        self.profile = profile
        self.ranks = ranks
        self.takes_any_rank = False  # a front end that counts its ranks from 0
        self.sleeping = SleepMode(on_sleep=self.forget_prefixes)
        self.model = model
        self.adapters = adapters or LoraAdapters()
        self.host = host
        self.port = port
        self.faults = Faults()
        self.requests: deque[ReceivedRequest] = deque(maxlen=RECORDED_REQUESTS)
        self.aborts = 0  # answers to disconnected callers
        self._speed = speed
        self._tokens_per_event = tokens_per_event
        self._tells_times = tells_times
        self._seed = seed
        self._random = Random(seed)
        self._parser = RequestParser(profile, model, encode, self.adapters.names)
        self._ids = count(1)
        self._vllm = not isinstance(profile, ApiProfile)
        self.engine = self._new_engine()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Listen, with a fresh engine. Port 0 becomes a free port, which is kept over restarts."""
        self.engine = self._new_engine()
        self._metrics = VllmMetrics(self.model, time.time(), self.ranks, self.sleeping)
        self._driver: Driver = (
            EngineDriver(self.engine, self.faults, self._speed)
            if isinstance(self.engine, Engine)
            else HostedDriver(self.engine, self.faults, self._speed)
        )
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._errors])
        app.add_routes(self._routes())
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, keepalive_timeout=KEEPALIVE, shutdown_timeout=0.1
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.host, self.port, backlog=BACKLOG).start()
        except OSError:  # the port is in use: leave no task behind
            await self.stop()
            raise
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the listener, then all connections."""
        await self._runner.cleanup()
        await self._driver.close()

    async def kill(self) -> None:
        """Die as with SIGKILL: all connections are reset, and the engine loses everything."""
        server = self._runner.server
        for connection in server.connections if server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()
        self.engine.kill()
        await self.stop()

    def forget_prefixes(self) -> None:
        """Of prompts that are not in progress."""
        if isinstance(self.engine, Engine):
            self.engine.cache.drop_idle()

    def _new_engine(self) -> Engine | HostedApi:
        profile = self.profile
        return (
            HostedApi(profile, self._seed)
            if isinstance(profile, ApiProfile)
            else Engine(profile, self._seed, self.adapters)
        )

    def _routes(self) -> list[web.RouteDef]:
        common = [
            web.post("/v1/chat/completions", partial(self._answer, kind=ChatBody)),
            web.post("/v1/completions", partial(self._answer, kind=CompletionBody)),
            web.get("/v1/models", self._models),
            web.get("/simulate/faults", self._faults),
            web.post("/simulate/faults", self._faults),
        ]
        vllm_only = [
            web.get("/health", self._health),
            web.get("/version", self._version),
            web.get("/metrics", self._metrics_page),
            web.post("/tokenize", self._tokenize),
            *self.sleeping.routes(),
        ]
        return common + vllm_only if self._vllm else common

    async def _answer(self, http: web.Request, kind: type[ChatBody | CompletionBody]) -> web.StreamResponse:
        body = await self._read(http)
        await self._apply_request_faults()
        rank = http.headers.get("x-data-parallel-rank", "")
        if rank.isdigit() and int(rank) not in self.ranks and not self.takes_any_rank:
            raise Refused(400, f"data_parallel_rank {rank} is out of range")
        if self.sleeping.asleep:
            await self.sleeping.until_awake()
        parsed = self._parser.parse(next(self._ids), msgspec.convert(body, kind))
        fault = self.faults.of_stream(self._random)
        answer = AnswerWriter(parsed.request.prompt_tokens, self._driver.now(), fault, self._tokens_per_event)
        self._driver.submit(parsed.request, answer)
        self._metrics.live.add(answer)
        try:
            writer = self._writer(http, parsed, chat=kind is ChatBody)
            return await (self._stream if parsed.stream else self._whole)(http, writer, answer)
        finally:
            self._metrics.on_ended(answer)
            if not answer.done.is_set() and self.engine.alive:
                self.aborts += 1
            self._driver.abort(parsed.request.id)

    async def _stream(self, http: web.Request, writer: ReplyWriter, answer: AnswerWriter) -> web.StreamResponse:
        response = web.StreamResponse(headers={**STREAM_HEADERS, **self._rate_limit_headers()})
        response.enable_chunked_encoding()
        try:
            await response.prepare(http)
        except ConnectionResetError:  # the caller disconnected before the first byte
            return response
        if http.transport is not None:
            answer.stream_to(http.transport, writer)
        await answer.done.wait()
        with suppress(ConnectionResetError):  # the connection was cut, by a fault or by the caller
            await response.write_eof()
        return response

    async def _whole(self, http: web.Request, writer: ReplyWriter, answer: AnswerWriter) -> web.StreamResponse:
        await answer.done.wait()
        if answer.broken:
            raise Refused(500, "the engine failed (simulated)")
        return _json(writer.whole(answer.usage, answer.metrics()), headers=self._rate_limit_headers())

    def _writer(self, http: web.Request, parsed: ParsedRequest, *, chat: bool) -> ReplyWriter:
        suffix = http.headers.get("x-request-id") or uuid4().hex
        return ReplyWriter(
            reply=parsed.reply,
            id=("chatcmpl-" if chat else "cmpl-") + suffix,
            model=parsed.request.adapter or self.model,
            created=int(time.time()),
            chat=chat,
            vllm=self._vllm,
            usage=parsed.usage,
            done=not self.faults.omit_done,
            thinking=self.faults.thinking_tokens,
            tells_times=self._tells_times,
        )

    async def _models(self, http: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "created": int(time.time()), "owned_by": "simulated"}
        if self._vllm:
            model |= {"owned_by": "vllm", "root": self.model, "parent": None}
            model["max_model_len"] = self.profile.max_model_len
        adapters = [{**model, "id": name, "root": name, "parent": self.model} for name in sorted(self.adapters.names)]
        return _json({"object": "list", "data": [model, *adapters]})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.alive else 503)

    async def _version(self, http: web.Request) -> web.Response:
        return _json({"version": "0.32.0+simulated"})

    async def _metrics_page(self, http: web.Request) -> web.Response:
        assert isinstance(self.engine, Engine)
        return web.Response(text=self._metrics.page(self.engine), content_type="text/plain")

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = msgspec.json.decode(await http.read(), type=dict[str, Any])
        kind: type[ChatBody | CompletionBody] = ChatBody if "messages" in body else CompletionBody
        tokens = self._parser.encoder.prompt(msgspec.convert(body, kind)).tokens
        return _json({"count": len(tokens), "max_model_len": self.profile.max_model_len, "tokens": tokens})

    async def _faults(self, http: web.Request) -> web.Response:
        if http.method == "POST":
            wanted = msgspec.json.decode(await http.read(), type=Faults)
            for name in Faults.__struct_fields__:
                setattr(self.faults, name, getattr(wanted, name))
        return _json(self.faults)

    async def _read(self, http: web.Request) -> dict[str, Any]:
        raw = await http.read()
        if not self._vllm and not http.headers.get("authorization", "").startswith("Bearer "):
            raise Refused(401, "You didn't provide an API key: send it as 'Authorization: Bearer KEY'.")
        body = msgspec.json.decode(raw, type=dict[str, Any])
        headers = {name.lower(): value for name, value in http.headers.items()}
        self.requests.append(ReceivedRequest(http.path, headers, body))
        return body

    async def _apply_request_faults(self) -> None:
        if self.faults.silent:
            try:
                await asyncio.Event().wait()
            finally:
                self.aborts += 1
        status = self.faults.status
        if status is not None and self._random.random() < self.faults.status_share:
            raise Refused(status, "refused (simulated)", retry_after=self.faults.retry_after)

    def _rate_limit_headers(self) -> dict[str, str]:
        if isinstance(self.engine, Engine) or self.engine.profile.burst:
            return {}
        now = self._driver.now()
        return {
            "x-ratelimit-limit-requests": str(self.engine.profile.requests_per_minute),
            "x-ratelimit-remaining-requests": str(self.engine.remaining(now)),
            "x-ratelimit-reset-requests": f"{self.engine.resets_in(now) * 1e3:.0f}ms",
        }

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except msgspec.DecodeError as error:
            refused = Refused(400, str(error))
        except Refused as error:
            refused = error
        headers = self._rate_limit_headers() if refused.status == 429 else {}
        if refused.retry_after is not None:
            headers["Retry-After"] = f"{refused.retry_after:g}"
            if isinstance(self.engine, HostedApi) and self.engine.profile.burst:
                headers |= {"Retry-After": f"{ceil(refused.retry_after)}"}
                headers |= {"retry-after-ms": f"{ceil(refused.retry_after * 1e3)}"}
        return _json(error_body(refused, self._vllm), refused.status or 500, headers)


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=headers
    )
