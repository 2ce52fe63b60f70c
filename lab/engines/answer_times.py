"""Sums and counts of an engine's histograms: TTFT, inter-token latency, and latency of whole answers.

As vLLM counts them: the TTFT with the first token, a gap between tokens with the later token, the whole answer with its
end, each from the arrival at the API server; an aborted request counts no further.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lab.engines.engine_events import RequestId


class AnswerTimes:
    """All times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._arrived: dict[RequestId, float] = {}
        self._first: dict[RequestId, float] = {}
        self._ttft = self._itl = self._e2e = (0, 0.0)  # count and sum of answers that are over

    def on_submitted(self, id: RequestId, at: float) -> None:
        self._arrived[id] = at

    def on_first_token(self, id: RequestId, at: float) -> None:
        self._first[id] = at

    def on_finished(self, id: RequestId, at: float, tokens: int) -> None:
        arrived = self._arrived[id]
        self._e2e = self._e2e[0] + 1, self._e2e[1] + at - arrived
        self._drop(id, tokens, at)

    def on_aborted(self, id: RequestId, tokens: int, at: float) -> None:
        self._drop(id, tokens, at)

    def totals(self, tokens: Iterable[tuple[RequestId, int]], now: float) -> Mapping[str, Any]:
        """Fields of `policies.fleet.engine_load.EngineLoad`. `tokens`: of each answer in progress, as of `now`."""
        (firsts, ttft), (gaps, gap_s) = self._ttft, self._itl
        for id, count in tokens:
            if (first := self._first.get(id)) is not None:
                firsts, ttft = firsts + 1, ttft + first - self._arrived[id]
                gaps, gap_s = gaps + count - 1, gap_s + max(now - first, 0.0)
        counts = {"ttft_count": firsts, "itl_count": gaps, "e2e_count": self._e2e[0]}
        return {**counts, "ttft_sum": ttft, "itl_sum": gap_s, "e2e_sum": self._e2e[1]}

    def _drop(self, id: RequestId, tokens: int, at: float) -> None:
        arrived, first = self._arrived.pop(id, at), self._first.pop(id, None)
        if first is not None:
            self._ttft = self._ttft[0] + 1, self._ttft[1] + first - arrived
            self._itl = self._itl[0] + tokens - 1, self._itl[1] + at - first
