"""What a simulated server can be told to do wrong, for tests and for the demo.

Set as attributes of `SimulatedServer.faults`, or as a whole with `POST /simulate/faults` and a JSON
object of these names; names left out go back to their defaults, so `{}` heals the server.
"""

from __future__ import annotations

from random import Random

import msgspec


class StreamFault(msgspec.Struct, frozen=True):
    """What befalls one answer when its token number `after` (from 0) is due."""

    kind: str  # cut | garbage | error | stall
    after: int
    seconds: float | None = None  # of a stall; None: for good


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """All off by default."""

    silent: bool = False  # accept, and never answer
    headers_then_silence: bool = False  # 200 and its headers, and never a token
    status: int | None = None  # answer with this error ...
    status_share: float = 1.0  # ... this share of the requests
    retry_after: float | None = None  # s, sent with that error
    slow: float = 1.0  # every step takes this many times as long
    stall_share: float = 0.0  # this share of the answers stops ...
    stall_after_tokens: int = 0  # ... after so many tokens (0: 200 and headers only) ...
    stall_seconds: float | None = None  # ... for this long; None: for good
    cut_after_tokens: int | None = None  # reset the connection in mid-stream
    error_after_tokens: int | None = None  # an error event in place of a token; the stream ends
    garbage_after_tokens: int | None = None  # one event that is not JSON in place of a token
    omit_done: bool = False  # no [DONE] at the end

    def refusal(self, random: Random) -> int | None:
        """The status to refuse this request with, if it is one of the unlucky."""
        return self.status if self.status is not None and random.random() < self.status_share else None

    def of_stream(self, random: Random) -> StreamFault | None:
        """What is to befall this answer."""
        if self.headers_then_silence:
            return StreamFault("stall", 0)
        if self.stall_share and random.random() < self.stall_share:
            return StreamFault("stall", self.stall_after_tokens, self.stall_seconds)
        for kind in ("cut", "error", "garbage"):
            after: int | None = getattr(self, f"{kind}_after_tokens")
            if after is not None:
                return StreamFault(kind, after)
        return None
