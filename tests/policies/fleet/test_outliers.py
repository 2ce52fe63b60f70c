"""Outlier detection: an endpoint that refuses (4xx) requests that other endpoints of its pool answer."""

from __future__ import annotations

import pytest

from policies.fleet.circuit_breaker import BreakerState
from policies.fleet.fleet import Fleet
from policies.types import AttemptOutcome, Endpoint, Health, Pool
from tests.support.learned_fleet import API, ONE, TWO, fleet, load, send

REFUSED, COMPLETED = AttemptOutcome.REFUSED, AttemptOutcome.COMPLETED


def end(of: Fleet, outcome: AttemptOutcome, times: int, endpoint: Endpoint) -> None:
    for _ in range(times):
        key = send(of, endpoint=endpoint)
        of.on_ended(key, outcome, 0.0)


def judged(own: int, siblings: int, total: int = 20) -> Fleet:
    """Refusals by the first endpoint and by the second, of `total` answers each."""
    of = fleet()
    for endpoint, count in ((TWO, siblings), (ONE, own)):
        end(of, COMPLETED, total - count, endpoint)
        end(of, REFUSED, count, endpoint)
    return of


@pytest.mark.parametrize(
    ("own", "siblings", "outlier"),
    [(10, 0, True), (9, 0, False), (20, 3, True), (20, 4, False), (20, 20, False)],
)
def test_the_share_of_refusals_is_compared_with_the_rest_of_the_pool(own: int, siblings: int, outlier: bool) -> None:
    """If all endpoints refuse, the requests are at fault."""
    assert judged(own, siblings).view.is_outlier(ONE.id) is outlier


def test_ranks_of_a_server_are_judged_together() -> None:
    """Half of a pool is written with ranks of the other server: each has wrong siblings, and its server none."""
    hosts = {"wrong:8000": REFUSED, "right:8000": COMPLETED}
    ranks = {Endpoint(f"p/{host}/dp{n}", "p", host=host): end for host, end in hosts.items() for n in range(4)}
    of = Fleet([Pool("p", "m", tuple(ranks))])
    for endpoint, outcome in ranks.items():
        end(of, outcome, 4, endpoint)
    assert [of.view.is_outlier(endpoint.id) for endpoint in ranks] == [True] * 4 + [False] * 4


def test_the_only_endpoint_of_a_pool_is_no_outlier() -> None:
    """All its callers may be wrong."""
    of = fleet()
    end(of, REFUSED, 20, API)
    assert not of.view.is_outlier(API.id)


def test_refusals_of_an_outlier_count_as_failures() -> None:
    """Five more refusals open the breaker."""
    of = judged(10, 0)
    assert load(of).health is Health.UP
    end(of, REFUSED, 5, ONE)
    assert load(of).health is Health.DOWN


def test_a_refusal_confirmed_by_another_endpoint_clears_the_outlier() -> None:
    """A caller whose prompts all hit a single cache cannot take the endpoint down by bad requests."""
    of = judged(10, 0)
    for _ in range(20):
        end(of, REFUSED, 1, ONE)
        if of.view.is_outlier(ONE.id):
            of.on_refusal_confirmed(ONE.id)
    assert load(of).health is Health.UP


def test_without_larger_window_lists_pools_with_known_windows() -> None:
    """An unknown window may be larger; from a pool with an unknown window, only that pool is excluded."""
    windows = {"small": 8_000, "equal": 8_000, "large": 32_000, "unknown": None}
    of = Fleet([Pool(name, "m", (Endpoint(f"{name}/1", name),), context_window=w) for name, w in windows.items()])
    assert of.view.without_larger_window("small") == {"small", "equal"}
    assert of.view.without_larger_window("unknown") == {"unknown"}


def test_on_found_dead_lists_attempts_without_a_token() -> None:
    """Once, at the second failed probe in a row; attempts with a token continue."""
    of, found = fleet(), []
    of.on_found_dead = found.append
    silent, begun, _elsewhere = send(of), send(of), send(of, endpoint=TWO)
    of.on_first_token(begun, 0.1)
    for now in (1.0, 2.0, 3.0):
        of.on_probe_failed(ONE.id, now)
    assert found == [[silent]]


def test_on_breaker_is_called_at_each_transition() -> None:
    """With the state and the reason."""
    of, transitions = fleet(), []
    of.on_breaker = lambda endpoint, breaker: transitions.append((endpoint.id, breaker.state, breaker.cause.value))
    end(of, AttemptOutcome.MISCONFIGURED, 3, ONE)
    of.reload([Pool("small", "m", (ONE, TWO))])
    of.on_ended(send(of, now=1.0), COMPLETED, 1.0)
    assert transitions == [
        (ONE.id, BreakerState.OPEN, "misconfigured"),
        (ONE.id, BreakerState.HALF_OPEN, "misconfigured"),
        (ONE.id, BreakerState.CLOSED, "misconfigured"),
    ]
