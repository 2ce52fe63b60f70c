"""The header `x-slo-deadline`."""

from __future__ import annotations

from time import monotonic, time

import pytest

from gateway.api.api_error import ApiError
from gateway.api.request_headers import DEADLINE_HEADER, LATEST, deadline_by


@pytest.mark.parametrize("unit", [1, 1e3, 1e6], ids=["s", "ms", "us"])
def test_a_deadline_is_a_unix_time(unit: float) -> None:
    """In the units of `x-request-start`. The time since the arrival counts."""
    found = deadline_by({DEADLINE_HEADER: f"{(time() + 600.0) * unit:.0f}"}, monotonic() - 5.0)
    assert found == pytest.approx(605.0, abs=2.0)


def test_without_the_header_there_is_none() -> None:
    assert deadline_by({}, 0.0) is None


@pytest.mark.parametrize("text", ["", "6h", "tomorrow", "-1", "nan", "1e12", "2026-11-24T06:00:00Z", "9" * 5000])
def test_what_is_no_unix_time_is_refused_with_an_example(text: str) -> None:
    """A misread deadline must not become none."""
    with pytest.raises(
        ApiError, match=rf"^The header {DEADLINE_HEADER} must be a Unix time, such as \d+\.$"
    ) as refused:
        deadline_by({DEADLINE_HEADER: text}, 0.0)
    assert (refused.value.status, refused.value.param) == (400, DEADLINE_HEADER)


@pytest.mark.parametrize(("ahead", "reason"), [(-1.0, "is over"), (LATEST + 60.0, "is more than 7 days ahead")])
def test_a_deadline_that_is_over_or_too_far_ahead_is_refused(ahead: float, reason: str) -> None:
    """SDKs do not repeat a 400: what comes back after its deadline gains nothing by another try."""
    with pytest.raises(ApiError, match=f"^The time in the header {DEADLINE_HEADER} {reason}"):
        deadline_by({DEADLINE_HEADER: f"{time() + ahead:.3f}"}, 0.0)
