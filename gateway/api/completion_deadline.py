"""The time until which a caller wants the whole answer, as `x-slo-deadline` has it: Unix time, in any unit that
`x-request-start` may have."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic, time

from gateway.api.api_error import bad_request
from gateway.api.request_start import sent_at

HEADER = "x-slo-deadline"
LATEST = 7 * 86_400.0  # s ahead


def by(headers: Mapping[str, str], arrival: float) -> float | None:
    """Seconds from the arrival, by the monotonic clock, to the deadline; None: the caller names none. Raises
    ApiError (400)."""
    if (text := headers.get(HEADER)) is None:
        return None
    if (deadline := sent_at(text)) is None:
        raise bad_request(f"The header {HEADER} must be a Unix time, such as {time() + 3600:.0f}.", HEADER)
    left = deadline - time()
    if not 0 < left <= LATEST:
        reason = "is over" if left <= 0 else f"is more than {LATEST / 86_400:.0f} days ahead"
        raise bad_request(f"The time in the header {HEADER} {reason}.", HEADER)
    return monotonic() - arrival + left
