"""The rehearsed model with the context window of a local engine, which refuses one token too many as vLLM does."""

from __future__ import annotations

import json

from gateway.tokenize.tokenizers import encoder
from tests.programs.clients.rehearsed_model import Json

MODEL = "windowed"
WINDOW = 32_768  # tokens of prompt and answer


def tokens(body: Json) -> list[str]:
    """The prompt of a chat or of Messages, as a template writes it."""
    parts = [json.dumps(body[name]) for name in ("tools", "system") if body.get(name)]
    said = [f"{message['role']}\n{_text(message)}" for message in body["messages"]]
    return list(map(str, encoder("o200k_base").encode("\n".join([*parts, *said]))))


def _text(message: Json) -> str:
    content = message.get("content") or ""
    calls = json.dumps(message.get("tool_calls") or "")
    return (content if isinstance(content, str) else json.dumps(content)) + calls


def refusal(body: Json) -> str:
    """The words of vLLM 0.32; empty: the request fits."""
    if "messages" not in body:
        return ""
    prompt, asked = len(tokens(body)), body.get("max_completion_tokens") or body.get("max_tokens") or 1
    if prompt + asked <= WINDOW:
        return ""
    return (
        f"This model's maximum context length is {WINDOW} tokens. However, you requested {asked} output tokens and "
        f"your prompt contains {prompt} input tokens, for a total of {prompt + asked} tokens. Please reduce the length "
        "of the input prompt or the number of requested output tokens."
    )
