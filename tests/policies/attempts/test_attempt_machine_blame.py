"""A failed attempt is followed as its blame says."""

from __future__ import annotations

import pytest

from policies.attempts.candidate_walk import CandidateWalk, pools_alike, wait_before_retry
from policies.attempts.wire import AttemptLimits
from policies.blame.blame import BLAME, Elsewhere
from policies.types import Candidate
from tests.support.attempt_script import (
    API,
    A,
    B,
    GivenFacts,
    begun,
    fails,
    hedged,
    of_server,
    reason,
    told,
)

SIBLING, OTHER_POOL, NOBODY = ["open 2 fallback b"], ["open 2 fallback api"], ["give up"]
KEY1, KEY2 = of_server("api.example.com", "key1", "key2")

FOLLOWED = {
    Elsewhere.NOWHERE: NOBODY,
    Elsewhere.NEXT: SIBLING,
    Elsewhere.OTHER_POOL: OTHER_POOL,
    Elsewhere.OTHER_CREDENTIAL: OTHER_POOL,
    Elsewhere.LARGER_WINDOW: OTHER_POOL,
    Elsewhere.OTHER_FILTER: OTHER_POOL,
    Elsewhere.TRANSLATED: OTHER_POOL,
}


@pytest.mark.parametrize("kind", BLAME)
def test_every_kind_of_failure_is_followed_as_the_table_says(kind: str) -> None:
    """With a sibling and another pool to choose from, on a route that allows all."""
    step = begun(A, B, API, other_filter=True).failed(fails(1, kind), 0.1)
    assert told(step) == FOLLOWED[BLAME[kind].elsewhere]


@pytest.mark.parametrize("kind", [kind for kind, blame in BLAME.items() if blame.elsewhere is Elsewhere.NOWHERE])
def test_where_the_request_has_nowhere_to_go_it_is_refused(kind: str) -> None:
    """With candidates left that would all do the same."""
    refused = reason(begun(A, B, API).failed(fails(1, kind), 0.1))
    assert refused == "attempt 1 failed and no other endpoint would do better"


@pytest.mark.parametrize("kind", BLAME)
def test_a_failure_of_one_of_two_racing_attempts_opens_nothing(kind: str) -> None:
    """The other one may still answer."""
    race, now = hedged(A, B, API)
    assert told(race.failed(fails(1, kind), now)) == []
    assert told(race.first_token(2, now + 0.1)) == ["commit 2"]


@pytest.mark.parametrize(
    ("kind", "given", "followed"),
    [
        ("context", {"longer_context": False}, NOBODY),
        ("context", {"facts": GivenFacts(windows=["small", "api"])}, NOBODY),
        ("content_filter", {"other_filter": False}, NOBODY),
        ("content_filter", {"other_filter": True}, OTHER_POOL),
    ],
)
def test_a_route_may_forbid_another_pool(kind: str, given: dict[str, object], followed: list[str]) -> None:
    """A larger context window costs more, and another filter lets other words pass. No pool may be large enough."""
    assert told(begun(A, B, API, **given).failed(fails(1, kind), 0.1)) == followed


def test_another_key_of_the_server_is_asked_where_the_money_of_one_is_spent() -> None:
    """Each key may be of another account."""
    assert told(begun(KEY1, KEY2, API).failed(fails(1, "quota"), 0.1)) == ["open 2 fallback key2"]


def test_a_translated_request_stays_in_the_pool() -> None:
    """The same endpoint speaks another dialect, if there is no sibling; at once and uncharged."""
    assert told(begun(A, B, API).failed(fails(1, "unsupported", translated=True), 0.1)) == SIBLING
    assert told(begun(A).failed(fails(1, "unsupported", translated=True), 0.1)) == ["open 2 fallback a"]
    assert told(begun(A).failed(fails(1, "unsupported"), 0.1)) == NOBODY


# --------------------------------------------------------------------------- doubt


def test_a_doubtful_refusal_is_confirmed_by_another_endpoint() -> None:
    """An endpoint that refuses what its siblings answer may be wrong."""
    race = begun(A, B, API)
    assert told(race.failed(fails(1, "client", doubtful=True), 0.1)) == SIBLING
    assert told(race.failed(fails(2, "client"), 0.2)) == NOBODY


def test_without_another_endpoint_a_doubtful_refusal_stands() -> None:
    assert told(begun(A).failed(fails(1, "client", doubtful=True), 0.1)) == NOBODY


# --------------------------------------------------------------------------- the rules alone


def walk_of(*ranked: Candidate) -> CandidateWalk:
    walk = CandidateWalk(ranked, GivenFacts(), AttemptLimits(max_attempts=3))
    walk.take()
    return walk


@pytest.mark.parametrize("kind", BLAME)
def test_the_pools_alike_are_none_one_or_all(kind: str) -> None:
    """None of the pools, the pool of the endpoint, or every one (None)."""
    alike = pools_alike(fails(1, kind), A, walk_of(A, B), AttemptLimits(max_attempts=3), GivenFacts())
    wanted: dict[Elsewhere, set[str] | None] = {
        Elsewhere.NEXT: set(),
        Elsewhere.NOWHERE: None,
        Elsewhere.OTHER_FILTER: None,
    }
    assert (alike if alike is None else set(alike)) == wanted.get(BLAME[kind].elsewhere, {"small"})


@pytest.mark.parametrize(
    ("kind", "alone", "beside"),
    [
        ("connect", 0.0, 0.0),
        ("reset", 0.0, 0.0),
        ("timeout", 0.0, 0.0),
        ("protocol", 0.1, None),
        ("server", 0.1, None),
        ("provider", 0.1, None),
        ("overloaded", 0.1, None),
        ("rate_limited", None, None),
        ("auth", None, None),
        ("misconfigured", None, None),
        ("quota", None, None),
        ("gateway", None, None),
    ],
)
def test_the_wait_before_the_same_endpoint_is_asked_again(kind: str, alone: float | None, beside: float | None) -> None:
    """Seconds, alone in its pool and beside a sibling; None: it would say the same again, or the sibling is as good."""
    assert wait_before_retry(fails(1, kind), A, walk_of(A)) == alone
    assert wait_before_retry(fails(1, kind), A, walk_of(A, B)) == beside


@pytest.mark.parametrize(("named", "wait"), [(0.4, 0.4), (0.0, 0.1), (0.01, 0.1), (None, None)])
def test_an_endpoint_that_names_a_time_is_asked_again_then(named: float | None, wait: float | None) -> None:
    """Not before 100 ms."""
    assert wait_before_retry(fails(1, "rate_limited", retry_after=named), A, walk_of(A)) == wait


def test_an_endpoint_of_an_avoided_pool_is_not_asked_again() -> None:
    walk = walk_of(A)
    walk.avoid({"small"})
    assert wait_before_retry(fails(1, "connect"), A, walk) is None
