"""Errors on the wire. vLLM's carry a CamelCase `type` and an int `code`, OpenAI's a snake_case pair."""

from __future__ import annotations

from http.client import responses
from typing import Any

import msgspec

_VLLM_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
_OPENAI_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


class Rejected(Exception):
    """An error to be answered. `code` is OpenAI's, where the status alone does not say it."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers: dict[str, str] = {}

    def body(self, vllm: bool) -> bytes:
        """The error envelope."""
        return msgspec.json.encode({"error": self._vllm() if vllm else self._openai()})

    def _vllm(self) -> dict[str, Any]:
        kind = _VLLM_TYPES.get(self.status) or responses.get(self.status, "Error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.status}

    def _openai(self) -> dict[str, Any]:
        kind = "requests" if self.status == 429 else "server_error" if self.status >= 500 else "invalid_request_error"
        code = self.code or _OPENAI_CODES.get(self.status)
        return {"message": self.message, "type": kind, "param": self.param, "code": code}


def error_event(message: str) -> bytes:
    """An error inside a 200 stream."""
    return b"data: " + Rejected(500, message).body(vllm=True) + b"\n\n"
