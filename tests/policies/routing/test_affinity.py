"""Sessions return to their endpoint of an API; engines have a prefix index for that."""

from __future__ import annotations

from collections import Counter
from typing import Any

from policies.types import Health, Load, RequestView
from tests.support.decision_fleet import DecisionScenario, budget, order

FLEET = {"api": {"a": 0.30, "b": 0.36, "c": 0.42, "slow": 0.9}}
SESSIONS = [f"session-{number}" for number in range(60)]


def first(session: str, sequence: int = 0, local: bool = False, **more: Any) -> str:
    scenario = DecisionScenario(FLEET, pools={"api": {"local": local}}, **more)
    return order(scenario.decide(RequestView(0.0, stream=True, session=session), sequence=sequence))[0]


def test_a_session_returns_to_its_endpoint() -> None:
    """Whatever its number; sessions spread over the endpoints of similar speed, and over no other."""
    homes = {session: {first(session, sequence) for sequence in range(9)} for session in SESSIONS}
    assert {len(found) for found in homes.values()} == {1}
    counts = Counter(home for found in homes.values() for home in found)
    assert set(counts) == {"a", "b", "c"}
    assert min(counts.values()) >= 10


def test_without_a_session_the_fastest_is_first() -> None:
    """As before."""
    assert {first("", sequence) for sequence in range(9)} == {"a"}


def test_an_endpoint_that_is_down_moves_its_own_sessions_alone() -> None:
    """All others keep their caches."""
    down = {"b": Load(health=Health.DOWN)}
    for session in SESSIONS:
        home, now = first(session), first(session, loads=down)
        assert now == home if home != "b" else now in ("a", "c")


def test_a_session_does_not_make_a_request_late() -> None:
    """An endpoint outside of the budget is not in the draw: 0.9 of the answers of `b` take up to 504 ms."""
    assert {first(session, route=budget(0.45)) for session in SESSIONS} == {"a"}


def test_the_sessions_of_engines_are_left_to_the_prefix_index() -> None:
    """It knows what is cached."""
    assert {first(session, local=True) for session in SESSIONS} == {"a"}


def test_medians_of_next_to_nothing_are_alike_for_a_session() -> None:
    """Endpoints of this machine differ by a factor from answer to answer."""
    scenario = DecisionScenario({"api": {"a": 0.00005, "b": 0.0009}}, pools={"api": {"local": False}})
    asked = (RequestView(0.0, stream=True, session=session) for session in SESSIONS)
    assert {order(scenario.decide(each))[0] for each in asked} == {"a", "b"}
