"""Several processes in front of one fleet, and the state that each publishes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fleet.circuit_breaker import EJECTION
from policies.fleet.engine_load import EngineLoad
from policies.fleet.fleet import AttemptReport, Fleet
from policies.fleet.peers import NO_LOAD, PeerLoad, PeerReader, combined
from policies.latency.token_counts import PrefillQueue
from policies.latency.tpot import STALL_GRID
from policies.types import FOREVER, NEVER, AttemptOutcome, Endpoint, Health
from tests.support.learned_fleet import API, HOSTED, ONE, SMALL, TWO, answer, load, median_ttft, prompt, send

MISS_CURVES = st.just(()) | st.tuples(*[st.sampled_from([0.0, 0.5, 2.0])] * len(STALL_GRID))
COUNTS = st.integers(0, 1 << 20)
TIMES = st.sampled_from([NEVER, 0.0, 1.0, 2.5])
LOADS = st.builds(
    PeerLoad,
    *[COUNTS] * 6,
    st.integers(0, 1),
    st.sampled_from([0.0, 1.0, FOREVER]),
    *[TIMES] * 4,
    *[COUNTS.map(float)] * 3,
    st.sampled_from([0.02, FOREVER]),
    MISS_CURVES,
)


class LosslessLink:
    """A link between processes without losses."""

    def __init__(self, members: list[LosslessLink]) -> None:
        self.others = [other for other in members if other is not self]
        self.loads: dict[str, PeerLoad] = {}
        self.updates: set[str] = set()
        self.hints: list[tuple[str, Sequence[int]]] = []
        for other in self.others:
            other.others.append(self)
        members.append(self)

    def publish(self, endpoint_id: str, load: PeerLoad) -> None:
        self.loads[endpoint_id] = load
        for other in self.others:
            other.updates.add(endpoint_id)

    def publish_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        for other in self.others:
            other.hints.append((endpoint_id, hashes))

    def merge(self, reader: PeerReader, now: float) -> None:
        while self.updates:
            name = self.updates.pop()
            reader.on_peer_load(name, combined(o.loads[name] for o in self.others if name in o.loads), now)
        while self.hints:
            reader.on_peer_prompt(*self.hints.pop(0), now)


def fleets(count: int = 2) -> list[Fleet]:
    members: list[LosslessLink] = []
    made = [Fleet([SMALL, HOSTED]) for _ in range(count)]
    for each in made:
        each.peers = LosslessLink(members)
    return made


# --------------------------------------------------------------------------- load


def test_prompts_sent_by_a_peer_count_as_queued_tokens() -> None:
    """At once, until the first token; then as a running answer, until its end."""
    ours, theirs = fleets()
    key = send(theirs, prompt(4000))
    seen, own = load(ours), load(theirs)
    assert (seen.queued_tokens, seen.prefilling, seen.in_flight, seen.backlog_s) == (4000, 1, 1, own.backlog_s)
    theirs.on_first_token(key, 0.2)
    seen = load(ours, 0.2)
    assert (seen.queued_tokens, seen.prefilling, seen.running, seen.last_token_at) == (0, 0, 1, 0.2)
    assert seen.context == 4000
    theirs.on_ended(key, AttemptOutcome.COMPLETED, 1.0)
    assert (load(ours, 1.0).in_flight, load(ours, 1.0).running, load(ours, 1.0).context) == (0, 0, 0)


def test_two_processes_see_the_load_that_one_would_see() -> None:
    """For any division of the requests: queue, answers and TPOT pressure."""
    (one,), two, sent = fleets(1), fleets(), list[list[tuple[Fleet, int]]]()
    for i in range(6):
        sent.append([(to, send(to, prompt(3000 + i), now=0.1 * i)) for to in (one, two[i % 2])])
    for i, each in enumerate(sent[:3]):
        for to, key in each:
            to.on_first_token(key, 0.6 + 0.01 * i)
    expected, *seen = (load(of, 0.62) for of in (one, *two))
    for found in seen:
        assert (found.in_flight, found.prefilling, found.running) == (6, 3, 3)
        for name in (
            "queued_tokens",
            "context",
            "prefill_utilization",
            "last_token_at",
        ):  # other fields follow from these and each process's own learning
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=0.01), name


def test_changes_until_a_publication_are_one_request_to_publish() -> None:
    """The publication holds the state at its own time; the next change requests another publication."""
    ours, theirs = fleets()
    asked: list[Fleet] = []
    theirs.request_publish = lambda: asked.append(theirs)
    keys = [send(theirs, prompt(1000)) for _ in range(3)]
    theirs.on_ended(keys[0], AttemptOutcome.COMPLETED, 0.1)
    assert (len(asked), load(ours, 0.1).in_flight) == (1, 0)
    theirs.publish()
    assert load(ours, 0.1).in_flight == 2
    theirs.on_ended(keys[1], AttemptOutcome.COMPLETED, 0.2)
    assert len(asked) == 2


def test_peer_load_is_not_passed_on() -> None:
    """Three processes that read each other repeatedly: no count grows."""
    three = fleets(3)
    for to in three:
        send(to, prompt(1000))
    for now in (0.0, 0.1, 0.2, 0.3):
        assert [load(of, now).in_flight for of in three] == [3, 3, 3]
        for of in three:
            of.on_progress([], now)
    assert all(
        load(of, 0.3).prefill_utilization == pytest.approx(load(three[0], 0.3).prefill_utilization) for of in three
    )


def test_a_prefill_of_a_peer_that_ended_before_the_news_of_it_teaches_no_faster_engine() -> None:
    """The second turn of a conversation, at another process than the first: its first token comes at once."""
    ours, theirs = fleets()
    before = median_ttft(ours, tokens=2413)
    first = send(theirs, prompt(2400, blocks=150))
    assert load(ours, 0.02).queued_tokens > 1500
    theirs.request_publish = lambda: None
    theirs.on_first_token(first, 0.015)
    answer(ours, prompt(2415, blocks=150), now=0.02, ttft=0.01)
    assert median_ttft(ours, tokens=2413, now=2.0) > 0.4 * before


@pytest.mark.parametrize("taught", [0, 8])
def test_a_faster_engine_is_learned_behind_reported_prefills(taught: int) -> None:
    """A first token that no end of these prefills explains is learned from; a trained predictor trusts its reports."""
    ours, theirs = fleets()
    for i in range(taught):
        answer(ours, prompt(2000), now=-100.0 + i, ttft=0.1)
    alone, before = median_ttft(ours, tokens=2000), median_ttft(ours, tokens=6000)
    send(theirs, prompt(1000))
    answer(ours, prompt(2000), now=0.001, ttft=alone if taught else 0.25 * alone)
    assert median_ttft(ours, tokens=6000, now=2.0) < 0.95 * before


def test_requests_of_peers_in_a_scrape_are_not_counted_as_other_traffic() -> None:
    """Otherwise each would count twice: by the peer's report and by the engine's metrics."""
    ours, theirs = fleets()
    keys = [send(of) for of in (ours, theirs, theirs)]
    theirs.on_first_token(keys[1], 0.1)
    for now in (0.2, 0.7):
        load(ours, now)
        ours.on_scrape(ONE.id, EngineLoad(running=1, waiting=2), now)
    seen = load(ours, 0.7)
    assert (seen.in_flight, seen.running, seen.waiting) == (3, 1, 2)
    for now in (1.2, 1.7):
        ours.on_scrape(ONE.id, EngineLoad(running=3, waiting=2), now)
    assert load(ours, 1.7).running == 3


def test_a_restarted_peer_does_not_lower_the_prefill_utilization() -> None:
    """The peer's load in flight is gone; past prefills have stalled answers all the same."""
    ours, _ = fleets()
    ours.on_peer_load(
        ONE.id, replace(NO_LOAD, in_flight=2, prefilling=1, queued_tokens=500, queued_since=0.0, prefill_s=3.0), 0.0
    )
    duty = load(ours).prefill_utilization
    ours.on_peer_load(ONE.id, replace(NO_LOAD, prefill_s=0.5), 0.0)
    assert (load(ours).in_flight, load(ours).queued_tokens, load(ours).prefill_utilization) == (0, 0, duty)


def test_warming_and_rate_limits_of_a_peer_apply_to_all() -> None:
    """The process that finds out need not be the process that decides."""
    ours, theirs = fleets()
    theirs.set_warming(ONE.id, True)
    key = send(theirs, endpoint=TWO)
    theirs.on_ended(key, AttemptOutcome.RATE_LIMITED, 1.0, AttemptReport(retry_after=20.0))
    assert load(ours).warming
    assert load(ours, 1.0, TWO).limits.blocked_until == pytest.approx(21.0)


def test_load_of_a_removed_endpoint_is_withdrawn_from_peers_when_its_last_attempt_has_ended() -> None:
    """Not sooner: the server is busy, whoever lists it. Peers that keep the endpoint count nothing for ever."""
    ours, theirs = fleets()
    key = send(theirs)
    theirs.reload([HOSTED])
    assert load(ours).in_flight == 1
    theirs.on_ended(key, AttemptOutcome.COMPLETED, 1.0, AttemptReport(1000, 0, 10, 0.02))
    theirs.publish()
    assert load(ours).in_flight == 0


def test_a_peers_requests_at_an_endpoint_that_was_away_are_known_at_its_return() -> None:
    """What runs there by the peer's hand counts from the first moment, not from the peer's next full message."""
    ours, theirs = fleets()
    ours.reload([HOSTED])
    assert ours.view.knows(ONE.id)
    send(theirs)
    ours.snapshot(0.5)
    ours.reload([SMALL, HOSTED], mended=False)
    assert load(ours, 0.5).in_flight == 1


# --------------------------------------------------------------------------- health


def lose(endpoint: Endpoint, now: float, *finders: Fleet) -> None:
    """Fails two probes."""
    for finder in finders:
        finder.on_probe_failed(endpoint.id, now - 0.5)
        finder.on_probe_failed(endpoint.id, now)


def test_a_peer_report_takes_an_endpoint_down_for_all() -> None:
    """Without the report, a request of each process would have to fail. Reports are never passed on."""
    ours, theirs, third = fleets(3)
    lose(ONE, 1.0, theirs)
    assert [load(of, 1.0).health for of in (ours, third)] == [Health.DOWN] * 2
    assert load(ours, 1.0, TWO).health is Health.UP
    assert load(ours, 1.0 + EJECTION).health is Health.PROBING  # a report is not renewed by other peers


def test_an_own_probe_overrides_a_peer_report() -> None:
    """A peer whose network is broken: the endpoint is tried, answers, and is not lost again to the same peer."""
    ours, theirs = fleets()
    lose(ONE, 1.0, theirs)
    assert load(ours, 1.0).health is Health.DOWN
    ours.on_probe_answered(ONE.id, 1.3)
    assert load(ours, 1.3).health is Health.PROBING
    answer(ours, now=1.3)
    lose(ONE, 7.0, theirs)
    assert load(ours, 7.0).health is Health.UP
    assert load(theirs, 7.0).health is Health.DOWN


def test_a_peer_report_ends_with_its_peer() -> None:
    """The endpoint is then probing."""
    ours, theirs = fleets()
    lose(ONE, 1.0, theirs)
    assert load(ours, 1.0).health is Health.DOWN
    ours.on_peer_load(ONE.id, NO_LOAD, 2.0)
    assert load(ours, 2.0).health is Health.PROBING


def test_a_peer_that_reports_most_of_a_pool_down_is_ignored() -> None:
    """The peer has lost its own network: both of two endpoints, or the only endpoint."""
    ours, theirs = fleets()
    lose(API, 1.0, theirs)
    assert load(ours, 1.0, API).health is Health.UP
    lose(ONE, 1.0, theirs)
    assert load(ours, 1.0).health is Health.DOWN
    lose(TWO, 2.0, theirs)
    theirs.on_probe_failed(ONE.id, 2.1)  # the next probe of the first endpoint
    assert [load(ours, 2.1, endpoint).health for endpoint in (ONE, TWO)] == [Health.PROBING, Health.UP]


def test_peer_reports_never_take_the_last_endpoint_of_a_pool_down() -> None:
    """Two peers that each report another half down would leave no endpoint."""
    ours, theirs, third = fleets(3)
    lose(ONE, 1.0, theirs)
    load(ours, 1.0)
    lose(TWO, 1.1, third)
    assert [load(ours, 1.1, endpoint).health for endpoint in (ONE, TWO)] == [Health.DOWN, Health.UP]


# --------------------------------------------------------------------------- prefixes


def test_a_prefix_sent_by_a_peer_is_a_hit() -> None:
    """The next request of a conversation can arrive at any process."""
    ours, theirs = fleets()
    long = prompt(1600, blocks=100)
    send(theirs, long)
    load(ours)
    assert ours.view.hit(ONE, long) == theirs.view.hit(ONE, long) > 1500
    assert ours.view.hit(TWO, long) == 0


# --------------------------------------------------------------------------- sums


@given(st.lists(LOADS, max_size=4))
def test_peer_loads_sum_in_any_order(loads: list[PeerLoad]) -> None:
    """NO_LOAD changes nothing."""
    total = combined(loads)
    assert combined([*reversed(loads), NO_LOAD]) == total
    assert total.in_flight == sum(load.in_flight for load in loads)
    assert total.queued_since == min((load.queued_since for load in loads), default=FOREVER)


@pytest.mark.parametrize(
    ("own", "since", "heard_at", "expected"),
    [
        (
            PrefillQueue(10, 100, 1, 5.0),
            3.0,
            NEVER,
            PrefillQueue(30, 300, 3, 3.0),
        ),  # the engine began with the earlier prompt
        (
            PrefillQueue(10, 100, 1, 5.0),
            3.0,
            4.0,
            PrefillQueue(30, 300, 3, 4.0),
        ),  # a first token: earlier prompts are done
        (PrefillQueue(0, 0, 0, 1.0), 3.0, NEVER, PrefillQueue(20, 200, 2, 3.0)),  # an empty queue has no beginning
    ],
)
def test_prefill_queues_of_two_processes_join(
    own: PrefillQueue, since: float, heard_at: float, expected: PrefillQueue
) -> None:
    """First come, first served, from any process."""
    theirs = replace(
        NO_LOAD, in_flight=1, prefilling=1, queued_tokens=20, queued_pairs=200, queued_remainder=2, queued_since=since
    )
    assert theirs.joined_with(own, heard_at) == expected
    assert NO_LOAD.joined_with(own, heard_at) == own
