"""The time at which a request was sent, as a client or a proxy in front writes it into `x-request-start`.

nginx: `t=${msec}`, seconds with a fraction. Heroku: milliseconds. Apache: `t=%t`, microseconds. The unit is told by the
size: the number is a time of this century.
"""

from __future__ import annotations

import re

HEADER = "x-request-start"
LONGEST = 3600.0  # s before arrival; what is older is no time of this request
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
    return None if sent is None or not 0 <= arrival - sent <= LONGEST else arrival - sent
