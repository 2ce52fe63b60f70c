"""llama.cpp's server: OpenAI's dialect, with a report of the load if started with --metrics."""

from __future__ import annotations

from backends.metered_engine import LoadMetrics, MeteredEngine
from backends.openai import Compatible


class LlamaCpp(MeteredEngine, Compatible):
    """`/health` and `/metrics` are 503 while the model loads; without --metrics, `/metrics` is a 501."""

    reads_reasoning = True
    refuses_models = False
    metrics = LoadMetrics(
        running=(b"llamacpp:requests_processing",),
        waiting=(b"llamacpp:requests_deferred",),
        kv_usage=(b"llamacpp:kv_cache_usage_ratio",),  # until 2025
    )
