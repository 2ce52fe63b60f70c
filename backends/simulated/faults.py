"""Faults of a simulated server, for tests and for the demo.

Set as attributes of `SimulatedServer.faults`, or as a whole with `POST /simulate/faults` and a JSON object of these
names; omitted names return to their defaults, so `{}` heals the server.
"""

from __future__ import annotations

from random import Random

import msgspec


class StreamFault(msgspec.Struct, frozen=True):
    """A fault of one answer, when its token number `after` (from 0) is due."""

    kind: str  # cut | garbage | error | stall
    after: int
    seconds: float | None = None  # of a stall; None: for ever


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """All off by default."""

    silent: bool = False  # accept, and never answer
    headers_then_silence: bool = False  # 200 and its headers, and never a token
    status: int | None = None  # answer with this error ...
    status_share: float = 1.0  # ... this share of the requests
    retry_after: float | None = None  # s, sent with this error
    slow: float = 1.0  # factor on the duration of every step
    stall_share: float = 0.0  # this share of the answers stops ...
    stall_after_tokens: int = 0  # ... after so many tokens (0: 200 and headers only) ...
    stall_seconds: float | None = None  # ... for this long; None: for ever
    cut_after_tokens: int | None = None  # reset the connection in mid-stream
    error_after_tokens: int | None = None  # an error event in place of a token; the stream ends
    garbage_after_tokens: int | None = None  # one event of invalid JSON in place of a token
    omit_done: bool = False  # no [DONE] at the end

    def error_status(self, random: Random) -> int | None:
        """The status of an error reply to this request, if any."""
        return self.status if self.status is not None and random.random() < self.status_share else None

    def of_stream(self, random: Random) -> StreamFault | None:
        if self.headers_then_silence:
            return StreamFault("stall", 0)
        if self.stall_share and random.random() < self.stall_share:
            return StreamFault("stall", self.stall_after_tokens, self.stall_seconds)
        for kind in ("cut", "error", "garbage"):
            after: int | None = getattr(self, f"{kind}_after_tokens")
            if after is not None:
                return StreamFault(kind, after)
        return None
