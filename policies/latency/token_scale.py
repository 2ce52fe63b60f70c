"""How many tokens the engine will count for a prompt, learned from what it reports.

A text count cannot see the chat template, tool definitions or images:
`reported = a * text + b * messages + c`. The prior is a template of 4 tokens a message and 3 to open
the answer (OpenAI's; ChatML and Llama 3 differ by about one).
"""

from __future__ import annotations

from policies.latency.regression import Regression

PER_MESSAGE = 4.0  # tokens
PER_PROMPT = 3.0  # tokens
CLIP = 0.5  # largest relative error one report may teach: an image is not a template
COMMON_VARIANCE = 0.01
VARIANCES = (0.02, 1.0, 100.0)  # of text (another tokenizer), messages (template), prompt (default system text)
NOISE = 0.03  # one report's relative error: two texts of as many tokens here differ by this much there


class TokenScale:
    """One pool's correction."""

    __slots__ = ("_fit",)

    def __init__(self) -> None:
        self._fit = Regression(VARIANCES, COMMON_VARIANCE, NOISE, floor=0.05)

    @property
    def scale(self) -> float:
        """The engine's tokens per token of text."""
        return self._fit.coefficients[0]

    def correct(self, text_tokens: int, messages: int) -> int:
        text, message, prompt = self._fit.coefficients
        return max(1, round(text * text_tokens + message * (PER_MESSAGE * messages) + prompt * PER_PROMPT))

    def observe(self, text_tokens: int, messages: int, reported: int) -> None:
        if reported > 0:
            self._fit.learn((float(text_tokens), PER_MESSAGE * messages, PER_PROMPT), float(reported), CLIP)
