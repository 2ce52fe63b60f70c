"""The most requests that an engine has in progress by its own limit (vLLM's `--max-num-queued-reqs`, SGLang's
`--max-queued-requests`), learned from its refusals: no page of an engine tells the limit.

Rules:
- The limit is the number of requests that were there when the engine refused another one, of all processes of the
  gateway. Where none of these was there, other clients have filled the engine, and nothing is learned.
- Of one caller the latest refusal counts: of many requests sent at once, the last one refused was beside the fewest.
- A limit that one caller's refusals show is kept for its own requests. For all callers counts the one that two callers
  have shown, the higher of theirs (`policies.fleet.caller_evidence`): nobody takes an engine from others.
- A limit is forgotten FORGOTTEN seconds after the latest refusal: another limit, or other clients that have left, cost
  a refusal a minute, which another endpoint or a wait hides.
"""

from __future__ import annotations

from collections.abc import Iterator

FORGOTTEN = 60.0  # s


class LearnedCap:
    def __init__(self, in_flight: int, now: float) -> None:
        self.limit = in_flight
        self.until = now + FORGOTTEN

    def at(self, now: float) -> int | None:
        """None: forgotten."""
        return self.limit if now < self.until else None

    def reasons(self, now: float) -> Iterator[tuple[str, str, float]]:
        """Belief, reason and end."""
        if now < self.until:
            yield f"cap of {self.limit} requests", "the engine refused more, by its own limit", self.until
