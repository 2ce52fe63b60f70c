"""The /metrics page of a simulated engine: Prometheus text with vLLM 0.32's names.

The format is that of the text exposition, version 0.0.4; counters end in `_total`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from backends.simulated.engine import Engine

# vllm/v1/metrics/loggers.py: buckets of time_to_first_token_seconds
_FINE = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TTFT_BUCKETS = (*_FINE, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)


class VllmHistogram:
    """A cumulative histogram of seconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._counts = [0] * (len(_TTFT_BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_TTFT_BUCKETS, seconds)] += 1
        self._sum += seconds

    def lines(self, labels: str) -> Iterator[str]:
        yield f"# TYPE {self.name} histogram"
        total = 0
        for bound, count in zip((*map(str, _TTFT_BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{{labels},le="{bound}"}} {float(total)}'
        yield f"{self.name}_count{{{labels}}} {float(total)}"
        yield f"{self.name}_sum{{{labels}}} {self._sum}"


class VllmMetrics:
    """What the server counts beside the engine's own numbers."""

    def __init__(self, model: str, started_at: float) -> None:
        self._labels = f'engine="0",model_name="{model}"'
        self._started_at = started_at  # s, wall clock
        self.ttft = VllmHistogram("vllm:time_to_first_token_seconds")
        self.prompt_tokens = 0
        self.generation_tokens = 0

    def page(self, engine: Engine) -> str:
        """The whole page."""
        gauges = {
            "vllm:num_requests_running": engine.running,
            "vllm:num_requests_waiting": engine.waiting,
            "vllm:kv_cache_usage_perc": engine.kv_usage,
        }
        counters = {
            "vllm:prefix_cache_queries_total": engine.prefix_queries,
            "vllm:prefix_cache_hits_total": engine.prefix_hits,
            "vllm:num_preemptions_total": engine.preemptions,
            "vllm:prompt_tokens_total": self.prompt_tokens,
            "vllm:generation_tokens_total": self.generation_tokens,
        }
        lines = (*self._scalars(gauges, "gauge"), *self._scalars(counters, "counter"), *self._rest(engine))
        return "\n".join(lines) + "\n"

    def _scalars(self, values: Mapping[str, float], kind: str) -> Iterator[str]:
        for name, value in values.items():
            yield f"# TYPE {name} {kind}"
            yield f"{name}{{{self._labels}}} {float(value)}"

    def _rest(self, engine: Engine) -> Iterator[str]:
        profile = engine.profile
        config = f'block_size="{profile.block_size}",enable_prefix_caching="True",engine="0"'
        yield "# TYPE vllm:cache_config_info gauge"
        yield f'vllm:cache_config_info{{{config},num_gpu_blocks="{profile.num_blocks}"}} 1.0'
        yield "# TYPE process_start_time_seconds gauge"
        yield f"process_start_time_seconds {self._started_at}"
        yield from self.ttft.lines(self._labels)
