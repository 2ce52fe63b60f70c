"""Tells API keys from placeholders.

SDKs demand a key, so servers without keys are configured with a word: `none`, `EMPTY`, `test`, `x`. Masking such a word
would rewrite whatever contains the word, and protect nothing.
"""

from __future__ import annotations

import re

SHORTEST = 16  # characters of a key without a known prefix; the APIs of catalog.py give 32 or more
# OpenAI, Anthropic, DeepSeek, OpenRouter, LiteLLM (sk), Groq, xAI, Fireworks, Hugging Face, NVIDIA, Google
_PREFIXED = re.compile(r"(?:(?:sk|pk|rk|gsk|xai|fw|hf|nvapi)[-_]|AIza)\S{4,}")


def is_secret(value: str) -> bool:
    """True for an API key; False for a placeholder."""
    return len(value) >= SHORTEST or _PREFIXED.fullmatch(value) is not None
