"""Who may write the rest of a broken answer, in which order, and after what silence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.blame.blame import BLAME
from policies.rescue.successors import MOST_FORECAST, able, in_order, is_of_request, patience, to_forecast
from policies.types import FOREVER, Candidate, Health, Load
from tests.support.attempt_script import API, A, B, C
from tests.support.decision_fleet import candidate

SLOW = candidate("slow", 3.0)
OWN = A.endpoint


@pytest.mark.parametrize(
    ("tpot", "others", "seconds"),
    [
        (0.01, [B], 2.0),
        (None, [B], 2.0),
        (0.2, [B], 4.0),
        (0.01, [SLOW, B], 6.0),
        (0.2, [SLOW], 6.0),
        (5.0, [B], 100.0),
        (0.01, [candidate("x", 9.0, "other"), B], 2.0),
        (0.01, [candidate("x", 9.0, "other")], 18.0),
        (0.01, [], FOREVER),
    ],
    ids=[
        "the least",
        "no pace yet",
        "20 mean gaps",
        "twice the TTFT of the first",
        "the longest of these",
        "a slow pace",
        "the first of the own pool",
        "the first of another pool",
        "nobody",
    ],
)
def test_the_patience_with_a_silent_stream(tpot: float | None, others: list[Candidate], seconds: float) -> None:
    """By its pace, and by what another would take."""
    assert patience(OWN, tpot, others) == pytest.approx(seconds)


@pytest.mark.parametrize("kind", ["content_filter", "client", "request_size", "content", "context"])
def test_a_fault_of_the_request_breaks_every_endpoint(kind: str) -> None:
    assert is_of_request(BLAME[kind])
    assert not is_of_request(BLAME["reset"])


def loads(**health: Health) -> dict[str, Load]:
    return {name: Load(health=of) for name, of in health.items()}


def test_endpoints_that_are_up_in_pools_without_an_obstacle_are_able() -> None:
    """Of the others the pool is asked once."""
    asked: list[str] = []

    def obstacle(endpoint: object) -> str:
        asked.append(str(getattr(endpoint, "pool", "")))
        return "it does not continue" if asked[-1] == "api" else ""

    seen = loads(b=Health.DOWN, c=Health.UP, d=Health.UP, api=Health.UP)
    assert able([B, C, candidate("gone"), candidate("d"), API, API], seen, obstacle) == [C, candidate("d")]
    assert asked == ["small", "api"]


def test_the_soonest_as_of_now_is_first() -> None:
    """Not as of the decision: a dead engine leaves many answers at once. One of unknown forecast is last."""
    assert in_order(OWN, [candidate("d"), B, C], {"b": 2.0, "c": 0.2}) == [C, B, candidate("d")]


def test_the_own_pool_is_first_and_a_sooner_pool_no_earlier_than_it_is_ranked() -> None:
    """Another pool serves another model, and a later tier may cost more, whatever its forecast."""
    other = candidate("x", pool="next")
    assert in_order(OWN, [other, API, C], {"x": 0.5, "api": 0.1}) == [C, other, API]


def test_few_are_forecast_and_those_of_the_pool_with_the_least_queued_first() -> None:
    """None that another prefill would push above its pace."""
    many = [candidate(f"e{number}") for number in range(2 * MOST_FORECAST)]
    seen = {each.endpoint.id: Load(backlog_s=100.0 - rank) for rank, each in enumerate(many)}
    seen |= {"api": Load(), "full": Load(tpot_pressure=1.0)}
    found = to_forecast(OWN, [API, candidate("full"), *many], seen)
    assert [each.id for each in found] == [f"e{number}" for number in reversed(range(MOST_FORECAST, 2 * MOST_FORECAST))]
    assert to_forecast(OWN, [API, many[0]], seen) == [many[0].endpoint, API.endpoint]
    assert to_forecast(replace(OWN, pool="api"), [many[0], API], seen)[0] == API.endpoint
