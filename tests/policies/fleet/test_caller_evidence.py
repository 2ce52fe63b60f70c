"""Evidence against an endpoint counts for the caller that met with it, until a second one has met with the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from policies.adapters.adapter_slots import AdapterFacts
from policies.blame.blame import BLAME, Evidence
from policies.fleet.beliefs import ALL
from policies.fleet.caller_evidence import MAX_CALLERS, RECENT, CallerEvidence
from policies.fleet.circuit_breaker import EJECTION_RESET, CircuitBreaker
from policies.fleet.endpoint_state import EndpointState
from policies.fleet.fleet import AttemptReport, Fleet
from policies.fleet.fleet_reader import FleetViews
from policies.fleet.peers import PeerLoad, PeerReader
from policies.rate_limit.endpoint_limits import ProviderRefusal
from policies.rate_limit.send_limits import RateLimit
from policies.types import NEVER, AttemptOutcome, Endpoint, Health, Load, Pool, PoolEstimate
from tests.support.learned_fleet import API, HOSTED, ONE, SMALL, answer, fleet, load, prompt, send

FAILED = 20  # times in a row: more than any threshold
WITNESSED = [kind for kind, row in BLAME.items() if row.evidence.needs_witness]
HARMLESS = [kind for kind, row in BLAME.items() if row.evidence in (Evidence.NONE, Evidence.ANSWERED)]
REFUSED = ("connect", "reset")  # the connection is


def fail(of: Fleet, kind: str, caller: str, now: float = 0.0, endpoint: Endpoint = API, times: int = 1) -> None:
    """A caller's requests end so."""
    for _ in range(times):
        key, row = send(of, endpoint=endpoint, now=now, caller=caller), BLAME[kind]
        report = AttemptReport(blame=row, connected=kind not in REFUSED, retry_after=30.0, cause=f"999 {kind}: secret")
        of.on_ended(key, row.outcome, now, report)


def seen(of: Fleet, caller: str, now: float = 0.0, endpoint: Endpoint = API) -> Load:
    return of.snapshot_for(caller, now).loads[endpoint.id]


def usable(of: Fleet, caller: str, now: float = 0.0, endpoint: Endpoint = API) -> bool:
    found = seen(of, caller, now, endpoint)
    return found.health is Health.UP and found.limits.wait(100, now) == 0


class Told:
    """A link to peers that keeps the latest load published of each endpoint."""

    def __init__(self) -> None:
        self.loads: dict[str, PeerLoad] = {}

    def publish(self, endpoint_id: str, load: PeerLoad) -> None:
        self.loads[endpoint_id] = load

    def publish_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        """Not looked at here."""

    def merge(self, reader: PeerReader, now: float) -> None:
        """No peer says anything."""


@pytest.mark.parametrize("endpoint", [API, ONE])
@pytest.mark.parametrize("kind", [*WITNESSED, *HARMLESS])
def test_no_kind_of_failure_of_one_caller_takes_an_endpoint_from_another(kind: str, endpoint: Endpoint) -> None:
    """However often: the other caller sees the same load as before, and the cache of the engine."""
    of = fleet()
    answer(of, prompt(blocks=4), endpoint, now=0.0)
    before = replace(seen(of, "b", 100.0, endpoint), at=0.0)
    fail(of, kind, "a", 100.0, endpoint, FAILED)
    after = replace(seen(of, "b", 100.0, endpoint), at=0.0)
    assert (after.health, after.limits.wait(100, 100.0), after.failing) == (before.health, 0.0, False)
    assert of.snapshot(100.0).loads[endpoint.id] == of.snapshot_for("b", 100.0).loads[endpoint.id]
    assert endpoint.id not in of.cache_lost


@pytest.mark.parametrize("kind", WITNESSED)
def test_its_own_caller_leaves_the_endpoint_at_once(kind: str) -> None:
    """By the same thresholds as before: a second failure in a row may be enough, five are."""
    of = fleet()
    fail(of, kind, "a", times=5)
    assert not usable(of, "a")


@pytest.mark.parametrize("kind", WITNESSED)
def test_a_second_caller_with_the_same_takes_the_endpoint_from_all(kind: str) -> None:
    """The third has sent nothing yet."""
    of = fleet()
    fail(of, kind, "a", times=5)
    assert usable(of, "c")
    fail(of, kind, "b")
    assert not usable(of, "c")


@pytest.mark.parametrize("kind", WITNESSED)
def test_a_request_of_the_gateways_own_needs_no_second_witness(kind: str) -> None:
    """It has the gateway's credential and model, and nothing of a caller."""
    of = fleet()
    fail(of, kind, "a", times=5)
    fail(of, kind, "")
    assert not usable(of, "c")


@pytest.mark.parametrize("kind", HARMLESS)
def test_an_answer_that_blames_the_request_changes_nothing_for_anyone(kind: str) -> None:
    of = fleet()
    for caller in ("a", "b"):
        fail(of, kind, caller, times=FAILED)
    assert [usable(of, caller) for caller in "abc"] == [True] * 3


def test_a_refused_connection_needs_no_witness() -> None:
    """Nobody listens, whatever is sent: a dead engine is left after two attempts of one caller."""
    of = fleet()
    fail(of, "connect", "a", endpoint=ONE, times=2)
    assert (seen(of, "b", endpoint=ONE).health, ONE.id in of.cache_lost) == (Health.DOWN, True)


def test_a_refused_connection_confirms_a_reset() -> None:
    """The engine that one request has killed is gone for all."""
    of = fleet()
    fail(of, "reset", "a", endpoint=ONE)
    assert seen(of, "b", endpoint=ONE).health is Health.UP
    fail(of, "connect", "a", endpoint=ONE)
    assert seen(of, "b", endpoint=ONE).health is Health.DOWN


def test_evidence_of_two_callers_far_apart_confirms_nothing() -> None:
    of = fleet()
    fail(of, "auth", "a", now=100.0)
    fail(of, "auth", "b", now=100.0 + RECENT + 1)
    assert usable(of, "c", 100.0 + RECENT + 1)


def test_an_answer_in_between_clears_the_witness() -> None:
    """The server has answered since: what the first caller met with was not the server's state."""
    of = fleet()
    fail(of, "auth", "a", now=100.0)
    answer(of, endpoint=API, now=101.0)
    fail(of, "auth", "b", now=103.0, times=4)
    assert usable(of, "c", 103.0)


def test_a_first_token_clears_the_witness_before_its_answer_ends() -> None:
    """An answer may last for minutes."""
    of = fleet()
    fail(of, "auth", "a", now=100.0)
    of.on_first_token(send(of, endpoint=API, now=101.0), 102.0)
    fail(of, "auth", "b", now=103.0, times=4)
    assert usable(of, "c", 103.0)


def test_a_failed_probe_confirms_a_reset() -> None:
    """Two refusals in a row, one of which is certain."""
    of = fleet()
    of.on_probe_failed(ONE.id, 100.0)
    fail(of, "reset", "a", now=100.1, endpoint=ONE)
    assert seen(of, "b", 100.1, ONE).health is Health.DOWN


def test_different_evidence_of_two_callers_confirms_nothing() -> None:
    """A wrong id of one, an overloaded moment of the other."""
    of = fleet()
    fail(of, "misconfigured", "a", times=5)
    fail(of, "server", "b")
    assert usable(of, "c")


def test_requests_that_fail_at_a_removed_endpoint_cost_no_other_request() -> None:
    """A reload has removed the endpoint; those in progress there end after that."""
    of = fleet()
    keys = [send(of, endpoint=API, now=0.0, caller="a") for _ in "12"]
    of.reload([SMALL])
    of.snapshot(1.0)
    for key in keys:
        of.on_ended(key, AttemptOutcome.FAILED, 1.0, AttemptReport(blame=BLAME["server"]))
    assert of.snapshot_for("a", 1.0).loads.keys() == {each.id for each in SMALL.endpoints}


def test_a_caller_is_tried_again_after_the_ejection_and_let_in_by_an_answer() -> None:
    """As with a breaker for all: half-open, one trial, closed."""
    of = fleet()
    fail(of, "server", "a", times=5)
    assert [seen(of, "a", now).health for now in (4.9, 5.0)] == [Health.DOWN, Health.PROBING]
    key = send(of, endpoint=API, now=5.0, caller="a")
    assert (seen(of, "a", 5.0).health, seen(of, "b", 5.0).health) == (Health.DOWN, Health.UP)
    of.on_first_token(key, 5.5)
    assert seen(of, "a", 5.5).health is Health.UP


def test_a_caller_cannot_hold_a_recovering_endpoint_down() -> None:
    """The failed trial of one caller decides nothing: the next request of another is the trial."""
    of = fleet()
    for caller in "ab":
        fail(of, "server", caller, times=5)
    assert seen(of, "c", 5.0).health is Health.PROBING
    of.on_ended(send(of, endpoint=API, now=5.1, caller="e"), AttemptOutcome.COMPLETED, 5.2)
    for caller in "ab":
        fail(of, "server", caller, now=6.0 if caller == "a" else 6.5, times=5)
    now = 6.5 + 10.0
    assert seen(of, "c", now).health is Health.PROBING
    fail(of, "context", "d", now=now)
    for caller in "ab":
        fail(of, "server", caller, now=now + 1, times=5)
    now += 1 + 20.0 + RECENT
    for step in range(5):
        fail(of, "server", "a", now=now + step)
        assert seen(of, "c", now + step).health is Health.PROBING


def test_resets_of_one_caller_do_not_lose_the_cache_of_an_engine() -> None:
    """Its prompts would be computed again by all."""
    of = fleet()
    answer(of, prompt(blocks=50))
    fail(of, "reset", "a", now=2.0, endpoint=ONE, times=FAILED)
    assert of.view.hit(ONE, prompt(blocks=50)) > 0


def test_an_adapter_that_one_caller_found_missing_is_missing_for_this_caller() -> None:
    """Until a second one has found the same."""
    of = Fleet([replace(SMALL, variants=AdapterFacts(frozenset({"law"}), 4, 1.0))])
    wanted = PoolEstimate(100, variant="law")

    def refused(caller: str) -> None:
        key = send(of, wanted, ONE, caller=caller)
        of.on_ended(key, AttemptOutcome.MISCONFIGURED, 0.0, AttemptReport(unknown_model=True))

    def missing(caller: str) -> bool:
        return "law" in (seen(of, caller, 1.0, ONE).unknown_variants or {})

    refused("a")
    assert [missing(caller) for caller in "abc"] == [True, False, False]
    refused("b")
    assert [missing(caller) for caller in "abc"] == [True, True, True]


@pytest.mark.parametrize("kind", WITNESSED)
def test_peers_are_told_nothing_that_one_caller_alone_has_met_with(kind: str) -> None:
    of, told = fleet(), Told()
    of.peers = told
    fail(of, kind, "a", endpoint=ONE, times=FAILED)
    of.publish()
    assert (told.loads[ONE.id].blocked_until, told.loads[ONE.id].down_since) == (NEVER, NEVER)
    fail(of, kind, "b", endpoint=ONE, times=FAILED)
    of.publish()
    assert max(told.loads[ONE.id].blocked_until, told.loads[ONE.id].down_since) > NEVER


def evidence(*callers: str, now: float = 0.0) -> CallerEvidence:
    """Of a 401 to each."""
    found = CallerEvidence(CircuitBreaker(), ProviderRefusal())
    for number, caller in enumerate(callers):
        found.on_failed(number, caller, AttemptOutcome.MISCONFIGURED, Evidence.DENIED, now + 2 * RECENT * number)
    return found


def test_ten_thousand_callers_leave_a_bounded_trace() -> None:
    """The latest are kept."""
    found = evidence(*(f"caller{number}" for number in range(10_000))).states
    assert (len(found), "caller9999" in found, "caller1" in found) == (MAX_CALLERS, True, False)


def test_evidence_of_one_caller_is_forgotten() -> None:
    """An open breaker that nobody tries again for five minutes, a closed one after one."""
    found = evidence("a")
    found.on_failed("b", "b", AttemptOutcome.FAILED, Evidence.FAILED, 5.0)
    kept = []
    for now in (5.0 + EJECTION_RESET - 1, 5.0 + EJECTION_RESET, 309.0, 310.0):
        found.expire(now)
        kept.append([caller for caller in "ab" if caller in found.states])
    assert kept == [["a", "b"], ["a"], ["a"], []]


def test_evidence_that_is_over_is_dropped_without_another_event() -> None:
    """A caller that never comes back costs later decisions nothing."""
    state, views = EndpointState(API, HOSTED), FleetViews()
    views.reload({API.id: state}, {HOSTED.name: HOSTED})
    state.callers.on_failed("key", "a", AttemptOutcome.FAILED, Evidence.FAILED, 0.0)
    views.mark(state)
    kept = [len(state.callers.states) for now in (0.0, 1.0, 100.0) if views.at(now)]
    assert kept == [1, 1, 0]


def test_without_evidence_of_its_own_a_caller_gets_the_shared_snapshot() -> None:
    """The very value, so a decision costs nothing more."""
    of = fleet()
    assert of.snapshot_for("b", 0.0) is of.snapshot(0.0)
    fail(of, "auth", "a")
    assert of.snapshot_for("b", 0.0) is of.snapshot(0.0)
    assert of.snapshot_for("a", 0.0) is not of.snapshot(0.0)


def test_a_probe_is_asked_for_when_one_caller_alone_would_have_ejected_the_endpoint() -> None:
    """Not before the threshold, and not by a request that is at fault itself."""
    of, asked = fleet(), list[Endpoint]()
    of.on_unconfirmed = asked.append
    fail(of, "content", "a", times=FAILED)
    fail(of, "server", "a", times=4)
    assert not asked
    fail(of, "server", "a")
    fail(of, "auth", "a", endpoint=ONE)
    assert asked == [API, ONE]


def test_a_rate_limit_that_the_provider_reports_counts_for_all() -> None:
    """Its own figures need no second caller."""
    of = fleet()
    key = send(of, endpoint=API, caller="a")
    of.on_rate_limits(key, [RateLimit.reported(counts_tokens=False, limit=100, remaining=0, reset=30.0, now=0.0)])
    of.on_ended(key, AttemptOutcome.RATE_LIMITED, 0.0, AttemptReport(blame=BLAME["rate_limited"], retry_after=30.0))
    assert not usable(of, "b", 1.0)


def test_a_reload_lifts_what_it_may_have_mended_and_no_limit_of_a_provider() -> None:
    """Of one caller alone too: a key that is refused may be another now, and a provider's minute is what it was."""
    of = fleet()
    fail(of, "auth", "a")
    assert not usable(of, "a", 0.5)
    of.reload([SMALL, HOSTED])
    assert usable(of, "a", 0.5)
    fail(of, "request_rate", "b")
    of.reload([SMALL, HOSTED])
    assert not usable(of, "b", 0.5)


def test_another_key_is_tried_at_once_after_the_limit_of_the_former() -> None:
    """A limit is of one account at a server."""
    pools = [replace(HOSTED, endpoints=(replace(API, account=account),)) for account in ("first", "second")]
    of = Fleet([pools[0]])
    fail(of, "request_rate", "a")
    of.reload([pools[0]])
    assert not usable(of, "a", 0.5)
    of.reload([pools[1]])
    assert usable(of, "a", 0.5)


def test_a_provider_that_is_not_paid_for_one_caller_refuses_that_caller() -> None:
    """Until the next try: the caller is told the time."""
    of = fleet()
    fail(of, "quota", "a")
    own, shared = (found.loads[API.id].limits for found in (of.snapshot_for("a", 1.0), of.snapshot(1.0)))
    assert own.wait(100, 1.0) > 60.0
    assert shared.wait(100, 1.0) == 0.0


def test_beliefs_name_the_reason_and_count_the_callers() -> None:
    """Nothing of the message, which may hold content of a caller."""
    of = Fleet([HOSTED, Pool("other", "o", (Endpoint("other/1", "other"),), local=False)])
    for number, caller in enumerate("ab"):
        fail(of, "quota", caller, now=100.0 + 2 * RECENT * number)
    fail(of, "request_rate", "b", now=221.0)
    unpaid = "the gateway's account with the provider is used up (999 quota)"
    found = {(each.what, each.why, each.callers) for each in of.view.beliefs(of.snapshot(221.0).loads, 221.0)[API.id]}
    assert found == {
        ("down", unpaid, 2),
        ("limited by its provider", "rate limit of requests reached (999 request_rate)", 1),
    }
    for caller in "ac":
        fail(of, "quota", caller, now=222.0)
    first = of.view.beliefs(of.snapshot(222.0).loads, 222.0)[API.id][0]
    assert (first.what, first.why, first.callers) == ("down", unpaid, ALL)
    assert of.view.beliefs(of.snapshot(222.0).loads, 222.0).keys() == {API.id}


def test_the_reason_of_an_ejection_names_the_failure() -> None:
    """In place of a number alone."""
    of = fleet()
    for number in range(5):
        key = send(of, endpoint=ONE)
        of.on_ended(
            key, AttemptOutcome.FAILED, 0.1 * number, AttemptReport(blame=BLAME["server"], cause="500 cuda: at 0x0")
        )
    assert of.view.statistics(ONE.id, 1.0).why == "5 requests in a row failed: 500 cuda"
    assert load(of, 1.0).health is Health.DOWN
