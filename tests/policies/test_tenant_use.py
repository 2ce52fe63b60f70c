"""Engine time used by tenants, and who is above the fair share."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gateway.config.models import Key
from policies.queue.queued_request import QueuedRequest
from policies.tenant_use import ACTIVE, MOST, TIME_CONSTANT, TenantUse, engine_seconds
from policies.types import Candidate, Endpoint, Forecast, Load, PromptEstimate, RequestView
from tests.support.queue_fixture import route


def queued(tenant: str = "a", weight: float = 1.0, choices: int = 1) -> QueuedRequest:
    return QueuedRequest(0, RequestView(0.0, choices=choices), PromptEstimate({}, 100), route(), 0, tenant, weight)


def candidate(prefill: float = 1.0, tpot: float = 0.0, in_flight: int = 0) -> Candidate:
    forecast = Forecast(1.0, tpot=tpot, prefill=prefill)
    return Candidate(Endpoint("small/1", "small"), 0, 100, 0, forecast, 1.0, 0.0, load=Load(in_flight=in_flight))


def test_a_request_costs_its_prefill_and_its_part_of_the_decoding() -> None:
    """For each choice; the answers beside it share a step. An API has no engine to wait for."""
    assert engine_seconds(queued(), candidate(0.5, 0.02)) == pytest.approx(0.5 + 100 * 0.02)
    assert engine_seconds(queued(), candidate(0.5, 0.02, in_flight=9)) == pytest.approx(0.5 + 100 * 0.02 / 10)
    assert engine_seconds(queued(choices=4), candidate(0.5, 0.02, in_flight=9)) == pytest.approx(0.5 + 100 * 0.08 / 10)
    assert engine_seconds(queued(), candidate(0.0, 0.02)) == 0.0


def used(*charges: tuple[str, float], weights: dict[str, float] | None = None) -> TenantUse:
    shares = TenantUse()
    for tenant, seconds in charges:
        shares.charge(queued(tenant, (weights or {}).get(tenant, 1.0)), candidate(seconds), 0.0)
    return shares


def test_a_tenant_alone_is_never_above_its_share() -> None:
    shares = used(("a", 5.0), ("a", 50.0))
    assert not shares.is_over("a")
    assert not shares.is_over("b")


def test_above_the_share_is_more_than_the_others_together_per_weight() -> None:
    """Within the slack, equal tenants are equal."""
    assert not used(("a", 10.0), ("b", 1.4)).is_over("b")
    shares = used(("a", 10.0), ("b", 3.0), ("c", 0.0))
    assert [shares.is_over(tenant) for tenant in "abc"] == [False, True, False]


def test_a_tenant_with_twice_the_weight_may_use_twice_as_much() -> None:
    """A weight of 2 beside one of 1."""
    assert not used(("a", 10.0), ("b", 2.8), weights={"b": 2.0}).is_over("b")
    assert used(("a", 10.0), ("b", 3.2), weights={"b": 2.0}).is_over("b")


def test_the_least_weight_beside_the_largest_is_still_a_weight() -> None:
    """Those of the configuration: a smaller one would vanish in a sum, and others would be divided by zero."""
    least, most = (Key(name="k", sha256="0" * 64, weight=weight).weight for weight in (1e-3, 1e3))
    shares = used(("a", 5.0), ("b", 5.0), weights={"a": most, "b": least})
    assert (shares.is_over("a"), shares.is_over("b")) == (False, True)
    with pytest.raises(ValidationError):
        Key(name="k", sha256="0" * 64, weight=least / 2)


def test_a_new_tenant_has_neither_debt_nor_credit() -> None:
    """It starts at the mean: an hour without requests is no right to the engines for an hour."""
    shares = used(("a", 60.0), ("b", 0.01))
    assert not shares.is_over("a")
    assert not shares.is_over("b")


def test_a_new_tenant_inherits_no_debt_of_a_flood() -> None:
    """Beside a tenant far above its share it starts at the mean of the others, and stays within its share after it."""
    shares = used(("b", 5.0), ("c", 5.0), ("flood", 50.0), ("flood", 50.0), ("new", 0.1))
    assert shares.is_over("flood")
    assert shares.of("new") == pytest.approx(7.6)
    for second in range(1, 30):
        for tenant in ("b", "c", "new"):
            shares.charge(queued(tenant), candidate(0.1), float(second))
    assert not shares.is_over("new")


def test_no_request_costs_more_than_a_minute_of_an_engine() -> None:
    """10,000 prompts with 128 choices each: counted in full they would hide what all others use for hours."""
    assert engine_seconds(queued(choices=1_280_000), candidate(0.1, 0.02)) == MOST


def test_use_is_forgotten() -> None:
    """Half of it in 42 s; all of it without a request for some seconds."""
    shares = used(("a", 10.0))
    shares.charge(queued("a"), candidate(0.0), ACTIVE - 1)
    assert 8.0 < shares.of("a") < 10.0
    for second in range(int(ACTIVE), int(ACTIVE + TIME_CONSTANT)):
        shares.charge(queued("a"), candidate(0.0), float(second))
    assert 3.0 < shares.of("a") < 4.0
    shares.charge(queued("b"), candidate(1.0), 200.0)
    assert shares.of("a") == 0.0
