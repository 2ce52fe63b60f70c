"""Headers of a request that the gateway reads for itself: ids, the time of the sending, and the deadline.

`x-request-start` is the time at which a client or a proxy in front sent the request. nginx: `t=${msec}`, seconds with a
fraction. Heroku: milliseconds. Apache: `t=%t`, microseconds. The unit is told by the size: the number is a time of this
century. `x-slo-deadline`, until which a caller wants the whole answer, is in any of these units.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import count
from time import monotonic, time

from gateway.api.api_error import bad_request

_ID_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.:")
LONGEST = 128  # characters of a caller's own id


def request_id_of(headers: Mapping[str, str]) -> str:
    """The caller's own id if short and plain (ids are logged and returned); otherwise a new id."""
    given = headers.get("x-request-id", "")
    if given and len(given) <= LONGEST and _ID_CHARACTERS.issuperset(given):
        return given
    return new_request_id()


class RequestIds:
    """Ids unique over processes and restarts: each process, forked or not, has a random prefix."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self._prefix = f"req_{os.urandom(8).hex()}"

    def __call__(self) -> str:
        return f"{self._prefix}{next(self._numbers):08x}"


new_request_id = RequestIds()


START_HEADER = "x-request-start"
LONGEST_WAY = 3600.0  # s before arrival; what is older is no time of this request
_FORM = re.compile(r"(?:t=)?(\d{10,16}(?:\.\d{1,6})?)", re.ASCII)
_UNITS = ((1e11, 1.0), (1e14, 1e3), (1e17, 1e6))  # number below, and units in a second


def sent_at(text: str | None) -> float | None:
    """Unix time, s; None: none that can be read."""
    found = None if text is None else _FORM.fullmatch(text.strip())
    if found is None:
        return None
    number = float(found[1])
    return next(number / unit for most, unit in _UNITS if number < most)


def sent_before(sent: float | None, arrival: float) -> float | None:
    """Seconds between both Unix times; None: the sender's clock, or the header, is wrong."""
    return None if sent is None or not 0 <= arrival - sent <= LONGEST_WAY else arrival - sent


DEADLINE_HEADER = "x-slo-deadline"
LATEST = 7 * 86_400.0  # s ahead


def deadline_by(headers: Mapping[str, str], arrival: float) -> float | None:
    """Seconds from the arrival, by the monotonic clock, to the deadline; None: the caller names none. Raises
    ApiError (400)."""
    if (text := headers.get(DEADLINE_HEADER)) is None:
        return None
    if (deadline := sent_at(text)) is None:
        raise bad_request(
            f"The header {DEADLINE_HEADER} must be a Unix time, such as {time() + 3600:.0f}.", DEADLINE_HEADER
        )
    left = deadline - time()
    if not 0 < left <= LATEST:
        reason = "is over" if left <= 0 else f"is more than {LATEST / 86_400:.0f} days ahead"
        raise bad_request(f"The time in the header {DEADLINE_HEADER} {reason}.", DEADLINE_HEADER)
    return monotonic() - arrival + left
