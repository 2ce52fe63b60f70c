"""TensorRT-LLM's `trtllm-serve`: OpenAI's dialect, with a report of the load.

Source: TensorRT-LLM documentation, "trtllm-serve" and "Prometheus Metrics" (2026-11). The page exists where the server
was started with `return_perf_metrics: true`.
"""

from __future__ import annotations

from backends.metered_engine import LoadMetrics, MeteredEngine
from backends.openai import Compatible


class TensorRT(MeteredEngine, Compatible):
    """Takes requests for any model name, and refuses unknown fields."""

    refuses_models = False
    metrics_path = "/prometheus/metrics"
    metrics = LoadMetrics(
        running=(b"trtllm_num_requests_running",),
        waiting=(b"trtllm_num_requests_waiting",),
        kv_usage=(b"trtllm_kv_cache_utilization",),
    )
