"""Token counts learned from what engines report: of prompts, by pool, and of answers, by route."""

from __future__ import annotations

from policies.latency.regression import Regression

PER_MESSAGE = 4.0  # tokens of a chat template (OpenAI's; ChatML and Llama 3 differ by about one)
PER_PROMPT = 3.0  # tokens which open the answer
CLIP = 0.5  # largest relative error a report may teach: an image is not a template
SCALE_VARIANCE = 0.01
VARIANCES = (0.02, 1.0, 100.0)  # of text (another tokenizer), messages (template), prompt (default system text)
REPORT_NOISE = 0.03  # a report's relative error: texts of equal count here differ by this much at the engine
MIN_SCALE = 0.05

PRIOR_LENGTH = 256  # tokens of an answer, before any
PRIOR_ANSWERS = 8  # answers which the prior counts for
LENGTH_WEIGHT = 1 / 64  # of the latest answer in the mean


class TokenScale:
    """Correction of one pool's prompt counts: `reported = a * text + b * messages + c`.

    A count of text cannot see the chat template, tool definitions or images.
    """

    def __init__(self) -> None:
        self._regression = Regression(VARIANCES, SCALE_VARIANCE, REPORT_NOISE, MIN_SCALE)

    @property
    def scale(self) -> float:
        """The engine's tokens per counted token of text."""
        return self._regression.coefficients[0]

    def correct(self, text_tokens: int, messages: int) -> int:
        return max(1, round(self._regression.predict((text_tokens, PER_MESSAGE * messages, PER_PROMPT))))

    def observe(self, text_tokens: int, messages: int, reported: int) -> None:
        if reported > 0:
            self._regression.update((text_tokens, PER_MESSAGE * messages, PER_PROMPT), reported, CLIP)


class OutputLengths:
    """Answer lengths of a route, learned from completed answers."""

    def __init__(self) -> None:
        self._mean = float(PRIOR_LENGTH)
        self._answers = PRIOR_ANSWERS

    def observe(self, tokens: int) -> None:
        self._answers += 1
        self._mean += (tokens - self._mean) * max(1 / self._answers, LENGTH_WEIGHT)

    def expected(self, max_tokens: int | None = None) -> int:
        """Expected tokens of an answer which may have at most `max_tokens`."""
        expected = round(self._mean)
        return max(1, expected if max_tokens is None else min(expected, max_tokens))
