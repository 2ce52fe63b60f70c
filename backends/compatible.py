"""Servers that speak OpenAI's dialect with differences."""

from __future__ import annotations

from typing import Any

from backends.interface import BackendRequest, HttpCall
from backends.openai import OpenAI


class Compatible(OpenAI):
    """Knows `max_tokens` alone, as nearly all did before OpenAI renamed it."""

    limit_name = "max_tokens"


class Mistral(Compatible):
    """Refuses unknown fields with a 422, and reports usage unasked in the last chunk."""

    asks_usage = False

    def _body(self, forward: BackendRequest) -> dict[str, Any]:
        body = super()._body(forward)
        body.pop("stream_options", None)
        limit = body.pop("max_completion_tokens", None)
        if limit is not None:
            body.setdefault("max_tokens", limit)
        return body


class LlamaCpp(Compatible):
    """llama.cpp's server. `/health` is 503 while the model loads; metrics exist only if enabled at start."""

    local = True

    def probe(self) -> HttpCall | None:
        return HttpCall("GET", "/health")


class Ollama(Compatible):
    """Ollama: a local engine that does not report its load."""

    local = True

    def probe(self) -> HttpCall | None:
        return HttpCall("GET", "/api/version")
