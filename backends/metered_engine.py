"""Engines with a report of their load: a Prometheus page.

The page may be 100 KB of histograms with eight lines of interest, so the text is searched, never parsed: series of the
same name lie together (text format 0.0.4). Engines and ranks of a server are added up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from backends.interface import HttpCall, Operation
from backends.openai import Compatible, OpenAI

MAX_MODEL = 128  # characters of a model's name
MAX_ADAPTERS = 16  # adapters of running requests to be read
MAX_ADAPTER_TEXT = 400  # characters of their names: every poll is sent to all workers
_MODEL_LABEL = re.compile(rb'[{,]model_name="([^"\\]*)"')

_ENGINE_LABEL = re.compile(rb'[{,]engine="(\d{1,4})"')
_RUNNING_ADAPTERS = re.compile(rb'[{,]running_lora_adapters="([^"\\]*)"')

EngineMetricNames = tuple[bytes, ...]  # names of the same meaning over versions: the first found counts


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """Names of an engine's load series. `read` returns fields of policies.fleet.engine_load.EngineLoad."""

    running: EngineMetricNames = ()
    waiting: EngineMetricNames = ()
    kv_usage: EngineMetricNames = ()
    prefix_queries: EngineMetricNames = ()
    prefix_hits: EngineMetricNames = ()
    preemptions: EngineMetricNames = ()
    rejections: EngineMetricNames = ()  # by the engine's own queue limit
    drafted: EngineMetricNames = ()  # tokens of speculative decoding
    accepted: EngineMetricNames = ()
    started_at: EngineMetricNames = (b"process_start_time_seconds",)
    info: bytes = b""  # an info series with block size and count in labels
    block_size: bytes = b"block_size"  # its label
    blocks: bytes = b"num_gpu_blocks"  # its label
    block_size_gauge: EngineMetricNames = ()  # or a gauge each
    tokens_gauge: EngineMetricNames = ()
    sleep: bytes = b""  # a gauge by state of sleep, in a label: 1 of the state that the engine is in
    adapters: bytes = b""  # an info series with names and number of LoRA adapters in labels; the value is a time

    def read(self, page: bytes, rank: int | None = None) -> Mapping[str, float | None]:
        """`rank`: read the series of one engine; None: of all."""
        page = b"\n" + (page if rank is None else _of_engine(page, rank)) + b"\n"
        usage = _values(page, self.kv_usage)
        block_size, blocks = self._cache(page)
        return {
            "running": _whole(_total(page, self.running)),
            "waiting": _whole(_total(page, self.waiting)),
            "kv_usage": sum(usage) / len(usage) if usage else None,
            "block_size": block_size,
            "kv_blocks": blocks,
            "started_at": max(_values(page, self.started_at), default=None),
            "prefix_queries": _total(page, self.prefix_queries),
            "prefix_hits": _total(page, self.prefix_hits),
            "preemptions": _total(page, self.preemptions),
            "rejections": _total(page, self.rejections),
            "drafted": _total(page, self.drafted),
            "accepted": _total(page, self.accepted),
            "asleep": self._asleep(page),
        }

    def model(self, page: bytes) -> str:
        """Label `model_name` of the running requests."""
        found = [labels for name in self.running for labels, _ in samples(b"\n" + page + b"\n", name)]
        match = _MODEL_LABEL.search(found[0]) if found else None
        name = "" if match is None else match[1].decode("utf-8", "replace")
        return name[:MAX_MODEL] if name.isprintable() else ""

    def running_adapters(self, page: bytes) -> tuple[list[str], int | None]:
        """Adapters of running requests, and adapters held at a time; None: not told. Of several series, the last set
        counts: vLLM keeps one for each set of names that it has ever seen."""
        series = samples(b"\n" + page + b"\n", self.adapters) if self.adapters else []
        if not series:
            return [], None
        labels, _ = max(series, key=lambda one: one[1])
        names = _RUNNING_ADAPTERS.search(labels)
        running = [] if names is None else names[1].decode("utf-8", "replace").split(",")
        return running, _label(labels, b"max_lora") or None

    def ranks(self, page: bytes) -> frozenset[int]:
        """Data-parallel ranks with a series of running requests."""
        found = [labels for name in self.running for labels, _ in samples(b"\n" + page + b"\n", name)]
        return frozenset(int(match[1]) for labels in found if (match := _ENGINE_LABEL.search(labels)))

    def _asleep(self, page: bytes) -> float | None:
        """1 if an engine of the page sleeps, 0 if none does; None: the page has no such metric."""
        states = samples(page, self.sleep) if self.sleep else []
        if not states:
            return None
        awake = [value for labels, value in states if b'sleep_state="awake"' in labels]
        return float(min(awake) == 0 if awake else any(value for _, value in states))

    def _cache(self, page: bytes) -> tuple[int | None, int | None]:
        infos = [labels for labels, _ in samples(page, self.info)] if self.info else []
        sizes = [size for labels in infos if (size := _label(labels, self.block_size))]
        counts = [count for labels in infos if (count := _label(labels, self.blocks))]
        if sizes:
            return sizes[0], sum(counts) or None
        gauge = _whole(max(_values(page, self.block_size_gauge), default=None))
        tokens = _total(page, self.tokens_gauge)
        return gauge, _whole(tokens / gauge) if gauge and tokens else None


def _of_engine(page: bytes, rank: int) -> bytes:
    """Lines of an engine, and lines without an engine label."""
    own, label = b'engine="%d"' % rank, b'engine="'
    return b"\n".join(line for line in page.split(b"\n") if label not in line or own in line)


def samples(page: bytes, name: bytes) -> list[tuple[bytes, float]]:
    """Labels and finite value of each series with the name. `page` begins and ends with a line feed."""
    found: list[tuple[bytes, float]] = []
    prefix = b"\n" + name
    start = page.find(prefix)
    while start >= 0:
        end = page.find(b"\n", start + 1)
        line = page[start + len(prefix) : end]
        if line.startswith((b"{", b" ")):  # not a longer name
            labels, _, rest = line.rpartition(b"}")
            with suppress(ValueError, IndexError):  # `value [timestamp]`
                value = float(rest.split()[0])
                if math.isfinite(value):
                    found.append((labels, value))
        start = -1 if found and not page.startswith(prefix, end) else page.find(prefix, end)
    return found


def _values(page: bytes, names: EngineMetricNames) -> list[float]:
    for name in names:
        if found := samples(page, name):
            return [value for _, value in found]
    return []


def _total(page: bytes, names: EngineMetricNames) -> float | None:
    values = _values(page, names)
    return sum(values) if values else None


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) else None  # a sum of finite values may not be


def _label(labels: bytes, name: bytes) -> int:
    """Integer value of a label; 0 if absent."""
    match = re.search(rb"[{,]" + name + rb'="(\d{1,18})"', labels)
    return int(match[1]) if match else 0


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class MeteredEngine(OpenAI):
    """An engine that speaks OpenAI's dialect. `metrics_path`: of the page with `metrics`."""

    local = True
    probe_path = "/health"
    limit_name = "max_tokens"
    metrics_path = "/metrics"
    wake_path = ""  # path that wakes a sleeping engine; empty: this kind tells of no sleep
    metrics: LoadMetrics

    def load(self) -> HttpCall | None:
        return HttpCall("GET", self.metrics_path)

    def read_load(self, body: bytes) -> Mapping[str, float | None]:
        return self.metrics.read(body, self.config.dp_rank)

    def read_adapters(self, body: bytes) -> tuple[tuple[str, ...], int | None]:
        if not (known := self.config.adapters):
            return (), None
        running, slots = self.metrics.running_adapters(body)
        found = [name for name in running[:MAX_ADAPTERS] if name in known]
        while sum(map(len, found)) > MAX_ADAPTER_TEXT:
            found.pop()
        return tuple(found), slots

    def other_ranks(self, body: bytes) -> str:
        rank, known = self.config.dp_rank, self.metrics.ranks(body) if self.config.dp_rank is not None else frozenset()
        if not known or rank in known:
            return ""
        first, last = min(known), max(known)
        if len(known) == 1:
            return f"rank {first}, not {rank}"
        told = f"{first}..{last}" if len(known) == last - first + 1 else ", ".join(map(str, sorted(known)))
        return f"ranks {told[:MAX_MODEL]}, not {rank}"

    def wake(self) -> HttpCall | None:
        return HttpCall("POST", self.wake_path) if self.wake_path else None

    def read_model(self, body: bytes) -> str:
        return self.metrics.model(body)

    def models(self) -> HttpCall | None:
        return self.listing()

    def read_models(self, body: bytes) -> frozenset[str]:
        try:
            return frozenset(model.id for model in msgspec.json.decode(body, type=_ModelList).data)
        except (ValueError, RecursionError):
            return frozenset()


# -- Text Generation Inference ---------------------------------------------------------------------
#
# Hugging Face's Text Generation Inference (TGI): OpenAI's dialect for chats, with a report of the load.
#
# Source: text-generation-inference documentation, "Messages API" and "Metrics" (archived in 2026-03). A batch in
# progress counts as its number of requests.


class TextGenerationInference(MeteredEngine, Compatible):
    """Takes requests for any model name."""

    native = frozenset({Operation.CHAT, Operation.COMPLETION})
    refuses_models = False
    metrics = LoadMetrics(running=(b"tgi_batch_current_size",), waiting=(b"tgi_queue_size",))


# -- TensorRT-LLM ----------------------------------------------------------------------------------
#
# TensorRT-LLM's `trtllm-serve`: OpenAI's dialect, with a report of the load.
#
# Source: TensorRT-LLM documentation, "trtllm-serve" and "Prometheus Metrics" (2026-11). The page exists where the
# server was started with `return_perf_metrics: true`.


class TensorRT(MeteredEngine, Compatible):
    """Takes requests for any model name, and refuses unknown fields."""

    refuses_models = False
    metrics_path = "/prometheus/metrics"
    metrics = LoadMetrics(
        running=(b"trtllm_num_requests_running",),
        waiting=(b"trtllm_num_requests_waiting",),
        kv_usage=(b"trtllm_kv_cache_utilization",),
    )


# -- llama.cpp -------------------------------------------------------------------------------------
#
# llama.cpp's server: OpenAI's dialect, with a report of the load if started with --metrics.


class LlamaCpp(MeteredEngine, Compatible):
    """`/health` and `/metrics` are 503 while the model loads; without --metrics, `/metrics` is a 501."""

    refuses_models = False
    metrics = LoadMetrics(
        running=(b"llamacpp:requests_processing",),
        waiting=(b"llamacpp:requests_deferred",),
        kv_usage=(b"llamacpp:kv_cache_usage_ratio",),  # until 2025
    )
