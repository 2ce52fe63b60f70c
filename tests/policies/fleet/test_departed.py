"""Endpoints that leave the configuration and come back: what is about their server goes on meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.adapters.adapter_slots import AdapterFacts
from policies.blame.blame import BLAME
from policies.fleet.departed import KEPT, MOST
from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import AttemptOutcome, Endpoint, Health, Pool
from tests.support.learned_fleet import API, HOSTED, ONE, SMALL, answer, candidate_of, load, median_ttft, prompt, send

CAPPED = replace(HOSTED, endpoints=(replace(API, account="x"),), concurrent_requests=4)
RENAMED = replace(CAPPED, name="other", endpoints=(Endpoint("other/1", "other", account="x"),))
OTHER_MODEL = replace(CAPPED, model="g-2026")
AS_ENGINE = replace(CAPPED, local=True)
WAYS = {"away": [], "renamed": [RENAMED], "another model": [OTHER_MODEL], "another kind of backend": [AS_ENGINE]}


def end(of: Fleet, key: int, now: float, outcome: AttemptOutcome = AttemptOutcome.COMPLETED) -> None:
    of.on_ended(key, outcome, now, AttemptReport(1000, 0, 10, 0.02))


def refused(of: Fleet, caller: str, now: float, seconds: float | None) -> None:
    key, row = send(of, endpoint=API, now=now, caller=caller), BLAME["rate_limited"]
    of.on_ended(key, row.outcome, now, AttemptReport(blame=row, retry_after=seconds))


@pytest.mark.parametrize("mended", [True, False], ids=["by a reload", "by discovery"])
@pytest.mark.parametrize("way", WAYS)
def test_what_runs_at_a_server_counts_whatever_its_entry_does(way: str, mended: bool) -> None:
    """The cap holds from the first moment of the return, and what ends meanwhile has ended."""
    of = Fleet([CAPPED])
    keys = [send(of, endpoint=API) for _ in range(4)]
    of.reload(WAYS[way], mended=mended)
    end(of, keys[0], 1.0)
    of.reload([CAPPED], mended=mended)
    assert (load(of, 1.0, API).in_flight, load(of, 1.0, API).full) == (3, False)
    send(of, endpoint=API, now=1.0)
    assert load(of, 1.0, API).full
    for key in keys[1:]:
        end(of, key, 2.0)
    assert load(of, 2.0, API).in_flight == 1


@pytest.mark.parametrize("way", ["renamed", "another model", "another kind of backend"])
def test_the_new_entry_of_a_busy_server_begins_with_what_runs_there(way: str) -> None:
    of = Fleet([CAPPED])
    for _ in range(4):
        send(of, endpoint=API)
    of.reload(WAYS[way])
    [endpoint] = WAYS[way][0].endpoints
    assert load(of, 1.0, endpoint).full


@pytest.mark.parametrize("way", ["away", "renamed"])
def test_an_attempt_opened_by_a_former_decision_counts_at_the_return(way: str) -> None:
    """A request keeps its endpoints over a reload: its second attempt may go to one that has just left."""
    of = Fleet([CAPPED])
    candidate = candidate_of(of, API, 0.0)
    for _ in range(3):
        send(of, endpoint=API)
    of.reload(WAYS[way])
    assert not of.is_closed(candidate, 0.5)
    of.on_sent("late", candidate, prompt(), 0.5, True)
    assert of.is_closed(candidate, 0.5)
    of.reload([CAPPED])
    assert load(of, 1.0, API).in_flight == 4


@pytest.mark.parametrize("way", WAYS)
def test_a_providers_limit_outlives_the_entry(way: str) -> None:
    """Of one caller's requests and of several callers'."""
    of = Fleet([CAPPED])
    for caller in ("a", "b", "c"):
        if caller == "c":
            of.reload(WAYS[way])
            of.reload([CAPPED])
        waits = [of.snapshot_for(each, 1.0).loads[API.id].limits.wait(100, 1.0) for each in ("a", "d")]
        expected = {"a": [0.0, 0.0], "b": [40.0, 0.0], "c": [40.0, 40.0]}[caller]
        assert waits == pytest.approx(expected)
        refused(of, caller, 1.0, 40.0)


def test_the_breaker_outlives_the_entry() -> None:
    """One that stays shut for its time, and one that found addresses alone do not open."""
    of = Fleet([CAPPED])
    for caller in "ab":
        key, row = send(of, endpoint=API, caller=caller), BLAME["quota"]
        of.on_ended(key, row.outcome, 0.0, AttemptReport(blame=row))
    of.reload([], mended=False)
    of.reload([CAPPED], mended=False)
    assert load(of, 1.0, API).health is Health.DOWN
    of.reload([CAPPED])
    assert load(of, 1.0, API).health is Health.PROBING


def test_learned_times_prefixes_and_adapters_come_back_with_the_server() -> None:
    facts = AdapterFacts(frozenset({"a"}), slots=2, load_s=1.0)
    pool = replace(SMALL, variants=facts)
    of, known = Fleet([pool]), replace(prompt(1000, blocks=62), variant="a")
    for now in range(9):
        answer(of, known, ONE, 10.0 * now, ttft=2.0)
    before = median_ttft(of, ONE, now=100.0)
    of.reload([replace(pool, endpoints=())], mended=False)
    of.reload([pool], mended=False)
    assert of.view.hit(ONE, known) == 992
    assert median_ttft(of, ONE, now=100.0) == pytest.approx(before)
    assert of.view.statistics(ONE.id, 100.0).variants == ("a",)
    assert of.cache_lost == set()


def test_attempts_of_the_former_model_teach_the_next_one_nothing() -> None:
    """Nor do their failures count against it."""
    of = Fleet([CAPPED])
    keys = [send(of, endpoint=API) for _ in range(8)]
    of.reload([OTHER_MODEL])
    for key in keys[:4]:
        of.on_first_token(key, 30.0)
        end(of, key, 31.0)
    for key in keys[4:]:
        of.on_ended(key, AttemptOutcome.FAILED, 31.0, AttemptReport(connected=False))
    assert of.view.statistics(API.id, 31.0).samples == 0
    assert median_ttft(of, API, now=31.0) < 1.0
    assert (load(of, 31.0, API).health, load(of, 31.0, API).in_flight) == (Health.UP, 0)


def test_a_server_is_forgotten_a_minute_after_its_entry_and_its_last_attempt() -> None:
    of = Fleet([CAPPED])
    key = send(of, endpoint=API)
    of.reload([])
    for now in (1.0, 1.0 + KEPT, 10 * KEPT):
        of.expire(now)
        assert of.view.knows(API.id)
    end(of, key, 10 * KEPT)
    of.expire(10 * KEPT)
    assert not of.view.knows(API.id)


def test_a_server_is_not_forgotten_before_its_limits_are_over() -> None:
    of = Fleet([replace(CAPPED, requests_per_minute=1)])
    send(of, endpoint=API)
    of.reload([])
    of.expire(0.0)
    for caller in "ab":
        of.reload([CAPPED])
        refused(of, caller, 50.0, 60.0)
        of.reload([])
    of.expire(50.0)
    of.expire(50.0 + KEPT - 1.0)
    assert of.view.knows(API.id)


def test_pods_that_come_and_go_leave_no_memory_behind() -> None:
    """Ten thousand within a minute, then none."""
    of, names = Fleet([SMALL]), [f"small/{number}" for number in range(10_000)]
    for number in range(0, len(names), 100):
        some = tuple(Endpoint(name, "small", account=name) for name in names[number : number + 100])
        of.reload([replace(SMALL, endpoints=some)], mended=False)
        of.expire(number / 1000)
    assert MOST <= sum(map(of.view.knows, names)) <= MOST + 100
    of.reload([SMALL], mended=False)
    of.expire(10.0)
    of.expire(10.0 + KEPT)
    assert sum(map(of.view.knows, names)) == len({ONE.id, "small/2"} & {*names})


def test_two_pools_that_name_one_server_have_states_of_their_own() -> None:
    """Each entry has a cap of its own, as before; one that leaves takes nothing from the other."""
    both = [CAPPED, RENAMED]
    of = Fleet(both)
    send(of, endpoint=API)
    of.reload([RENAMED])
    of.reload(both)
    [other] = RENAMED.endpoints
    assert (load(of, 1.0, API).in_flight, load(of, 1.0, other).in_flight) == (1, 0)


def test_a_pool_with_another_account_takes_over_no_limit() -> None:
    of = Fleet([CAPPED])
    for caller in "ab":
        refused(of, caller, 0.0, 40.0)
    other = Pool("other", "g", (Endpoint("other/1", "other", account="y"),), local=False)
    of.reload([other])
    assert load(of, 1.0, other.endpoints[0]).limits.wait(100, 1.0) == 0.0
