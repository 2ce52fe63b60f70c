"""The /metrics page of a simulated engine: Prometheus text (version 0.0.4) with vLLM 0.32's names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from backends.simulated.engine import Engine

# vllm/v1/metrics/loggers.py: buckets of time_to_first_token_seconds
_FINE = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TTFT_BUCKETS = (*_FINE, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TTFT = "vllm:time_to_first_token_seconds"


class VllmMetrics:
    """Counts answers; other numbers are the engine's."""

    def __init__(self, model: str, started_at: float) -> None:
        self._labels = f'engine="0",model_name="{model}"'
        self._started_at = started_at  # s, wall clock
        self._ttft_counts = [0] * (len(_TTFT_BUCKETS) + 1)
        self._ttft_sum = 0.0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    def observe(self, ttft: float, prompt_tokens: int, generation_tokens: int) -> None:
        """Count one answer. `ttft` in seconds."""
        self._ttft_counts[bisect_left(_TTFT_BUCKETS, ttft)] += 1
        self._ttft_sum += ttft
        self._prompt_tokens += prompt_tokens
        self._generation_tokens += generation_tokens

    def page(self, engine: Engine) -> str:
        return "\n".join(self._lines(engine)) + "\n"

    def _lines(self, engine: Engine) -> Iterator[str]:
        for name, kind, value in (
            ("num_requests_running", "gauge", engine.running),
            ("num_requests_waiting", "gauge", engine.waiting),
            ("kv_cache_usage_perc", "gauge", engine.kv_usage),
            ("prefix_cache_queries_total", "counter", engine.prefix_queries),
            ("prefix_cache_hits_total", "counter", engine.prefix_hits),
            ("num_preemptions_total", "counter", engine.preemptions),
            ("prompt_tokens_total", "counter", self._prompt_tokens),
            ("generation_tokens_total", "counter", self._generation_tokens),
        ):
            yield f"# TYPE vllm:{name} {kind}"
            yield f"vllm:{name}{{{self._labels}}} {float(value)}"
        config = f'block_size="{engine.profile.block_size}",enable_prefix_caching="True",engine="0"'
        yield "# TYPE vllm:cache_config_info gauge"
        yield f'vllm:cache_config_info{{{config},num_gpu_blocks="{engine.profile.num_blocks}"}} 1.0'
        yield "# TYPE process_start_time_seconds gauge"
        yield f"process_start_time_seconds {self._started_at}"
        yield f"# TYPE {_TTFT} histogram"
        total = 0
        for bound, count in zip((*map(str, _TTFT_BUCKETS), "+Inf"), self._ttft_counts, strict=True):
            total += count
            yield f'{_TTFT}_bucket{{{self._labels},le="{bound}"}} {float(total)}'
        yield f"{_TTFT}_count{{{self._labels}}} {float(total)}"
        yield f"{_TTFT}_sum{{{self._labels}}} {self._ttft_sum}"
