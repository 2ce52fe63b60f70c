"""Hugging Face's Text Generation Inference (TGI): OpenAI's dialect for chats, with a report of the load.

Source: text-generation-inference documentation, "Messages API" and "Metrics" (archived in 2026-03). A batch in progress
counts as its number of requests.
"""

from __future__ import annotations

from backends.interface import Operation
from backends.metered_engine import LoadMetrics, MeteredEngine
from backends.openai import Compatible


class TextGenerationInference(MeteredEngine, Compatible):
    """Takes requests for any model name."""

    native = frozenset({Operation.CHAT, Operation.COMPLETION})
    refuses_models = False
    metrics = LoadMetrics(running=(b"tgi_batch_current_size",), waiting=(b"tgi_queue_size",))
