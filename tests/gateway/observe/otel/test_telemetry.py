"""Which requests are told in any case."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.observe.otel.telemetry import FAULTS, notable
from gateway.observe.record import AttemptRecord, RequestOutcome
from policies.types import AttemptKind, AttemptOutcome
from tests.gateway.builders import record


def attempt(number: int, kind: AttemptKind = AttemptKind.PRIMARY) -> AttemptRecord:
    return AttemptRecord(number, kind, "small/a", "small", 0.0, 1.0, AttemptOutcome.COMPLETED)


NOTABLE: dict[str, dict[str, Any]] = {
    "its first token was late": {"ttft": 0.9},
    "its tokens were slow": {"tpot_budget": 0.05, "tpot": 0.06},
    "it took too long in all": {"total_budget": 0.5},
    "it left after its budget, without a token": {"end": RequestOutcome.CLIENT_GONE, "ttft": None, "total": 1.0},
    "it was sent twice": {"attempts": [attempt(1), attempt(2, AttemptKind.FALLBACK)]},
    "it was hedged": {"attempts": [attempt(1), attempt(2, AttemptKind.HEDGE)]},
    **{f"it ended as {end.value}": {"end": end, "ttft_budget": None} for end in FAULTS},
}
USUAL: dict[str, dict[str, Any]] = {
    "it met all its budgets": {"tpot_budget": 0.05, "tpot": 0.04, "total_budget": 2.0, "attempts": [attempt(1)]},
    "it was at fault itself": {"end": RequestOutcome.REFUSED, "ttft": None},
    "its caller left in time": {"end": RequestOutcome.CLIENT_GONE, "ttft": None, "total": 0.1},
    "nothing was promised": {"ttft_budget": None, "ttft": 30.0},
}


@pytest.mark.parametrize("known", NOTABLE.values(), ids=NOTABLE)
def test_what_an_operator_will_look_for_is_always_told(known: dict[str, Any]) -> None:
    """Whatever the share of traces is."""
    assert notable(record(**known))


@pytest.mark.parametrize("known", USUAL.values(), ids=USUAL)
def test_the_rest_is_a_sample(known: dict[str, Any]) -> None:
    """Nothing went wrong that was ours, or an engine's."""
    assert not notable(record(**known))
