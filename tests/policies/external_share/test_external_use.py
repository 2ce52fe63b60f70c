"""The use of external APIs by a route, against its limit."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from policies.external_share.external_use import WINDOW, ExternalUse
from policies.routes.route import External, Limits

HOUR = 60.0 * WINDOW  # s


def external(**limit: float) -> External:
    return External.model_validate(limit)


def test_a_share_is_of_the_requests_of_the_window() -> None:
    """2% allow the first attempt with the 50th request, the second with the 100th."""
    use, limit, sent = ExternalUse(), external(share=0.02), []
    for number in range(1, 151):
        use.on_arrived(number)
        if use.allows(limit, 0.0, number):
            use.on_sent(0.0, number)
            sent.append(number)
    assert sent == [50, 100, 150]


def test_requests_and_attempts_of_more_than_an_hour_ago_do_not_count() -> None:
    use, limit = ExternalUse(), external(share=0.5)
    for _ in range(4):
        use.on_arrived(0.0)
    assert use.allows(limit, 0.0, HOUR - 1)
    assert not use.allows(limit, 0.0, HOUR + 60)


def test_usd_are_those_of_the_last_hour() -> None:
    """What an attempt cost in the end replaces the expectation."""
    use, limit = ExternalUse(), external(usd_per_hour=1.0)
    use.on_sent(0.75, 0.0)
    assert not use.allows(limit, 0.5, 1.0)
    use.on_cost(-0.5, 2.0)
    assert use.allows(limit, 0.5, 3.0)
    use.on_sent(0.75, 3.0)
    assert not use.allows(limit, 0.25, HOUR - 1)
    assert use.allows(limit, 0.25, HOUR + 60)


def test_both_limits_hold() -> None:
    use, limit = ExternalUse(), external(share=1.0, usd_per_hour=1.0)
    assert not use.allows(limit, 0.1, 0.0)
    use.on_arrived(0.0)
    assert use.allows(limit, 0.1, 0.0)
    assert not use.allows(limit, 1.1, 0.0)


@pytest.mark.parametrize("written", ["2%", 0.02, {"share": "2%"}])
def test_a_share_may_be_written_alone(written: object) -> None:
    assert Limits.model_validate({"external": written}).external == external(share=0.02)


@pytest.mark.parametrize("written", [{}, "120%", {"usd_per_hour": -1}, "5 USD", True])
def test_a_limit_without_sense_is_refused(written: object) -> None:
    with pytest.raises(ValidationError):
        Limits.model_validate({"external": written})
