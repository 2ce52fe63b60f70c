"""Several processes before one fleet: what each knows of the others' part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fleet.circuit_breaker import EJECTION
from policies.fleet.fleet import AttemptReport, Fleet
from policies.fleet.peers import NO_LOAD, PeerLoad, PeerReader, combined
from policies.latency.token_counts import PrefillQueue
from policies.latency.tpot import STALL_GRID
from policies.types import FOREVER, NEVER, AttemptOutcome, Endpoint, EngineLoad, Health
from tests.policies.fleets import API, HOSTED, ONE, SMALL, TWO, answer, load, prompt, send

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

    def __init__(self, all_of_them: list[LosslessLink]) -> None:
        self.others = [other for other in all_of_them if other is not self]
        self.loads: dict[str, PeerLoad] = {}
        self.news: set[str] = set()
        self.hints: list[tuple[str, Sequence[int]]] = []
        for other in self.others:
            other.others.append(self)
        all_of_them.append(self)

    def publish(self, endpoint_id: str, load: PeerLoad) -> None:
        self.loads[endpoint_id] = load
        for other in self.others:
            other.news.add(endpoint_id)

    def publish_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        for other in self.others:
            other.hints.append((endpoint_id, hashes))

    def merge(self, reader: PeerReader, now: float) -> None:
        while self.news:
            name = self.news.pop()
            reader.on_peer_load(name, combined(o.loads[name] for o in self.others if name in o.loads), now)
        while self.hints:
            reader.on_peer_prompt(*self.hints.pop(0))


def fleets(count: int = 2) -> list[Fleet]:
    members: list[LosslessLink] = []
    made = [Fleet([SMALL, HOSTED]) for _ in range(count)]
    for each in made:
        each.peers = LosslessLink(members)
    return made


# --------------------------------------------------------------------------- load


def test_what_a_sibling_has_sent_waits_ahead_as_if_we_had_sent_it() -> None:
    """At once, and until its first token; then it runs, until its end."""
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


def test_one_process_and_two_see_the_same_load() -> None:
    """Whichever of the two sent what: the queue, the answers, and what they can bear."""
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
        ):  # what follows from these is each one's own learning
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=0.01), name


def test_what_changes_until_they_are_told_is_one_piece_of_news() -> None:
    """Asked for once; what is told then is what is, and the next change is asked for again."""
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


def test_what_is_heard_is_not_told_on() -> None:
    """Three of them, asked again and again: nothing grows."""
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


def test_a_scrape_shows_no_traffic_that_siblings_account_for() -> None:
    """Else each would count the others' requests twice: by what they tell, and by what the engine tells."""
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


def test_a_sibling_that_begins_anew_takes_nothing_back() -> None:
    """Load in flight is gone; past prefills have stalled our answers all the same."""
    ours, _ = fleets()
    ours.on_peer_load(
        ONE.id, replace(NO_LOAD, in_flight=2, prefilling=1, queued_tokens=500, queued_since=0.0, prefill_s=3.0), 0.0
    )
    duty = load(ours).prefill_utilization
    ours.on_peer_load(ONE.id, replace(NO_LOAD, prefill_s=0.5), 0.0)
    assert (load(ours).in_flight, load(ours).queued_tokens, load(ours).prefill_utilization) == (0, 0, duty)


def test_an_endpoint_that_a_sibling_warms_up_or_that_refused_it_is_left_alone_by_all() -> None:
    """The one who found out need not be the one who decides."""
    ours, theirs = fleets()
    theirs.set_warming(ONE.id, True)
    key = send(theirs, endpoint=TWO)
    theirs.on_ended(key, AttemptOutcome.RATE_LIMITED, 1.0, AttemptReport(retry_after=20.0))
    assert load(ours).warming
    assert load(ours, 1.0, TWO).blocked_until == pytest.approx(21.0)


def test_what_is_under_way_at_an_endpoint_that_is_ours_no_longer_is_not_told() -> None:
    """After a reload. Others may still have it, and would believe it for ever."""
    ours, theirs = fleets()
    send(theirs)
    assert load(ours).in_flight == 1
    theirs.reload([HOSTED])
    assert load(ours).in_flight == 0


# --------------------------------------------------------------------------- health


def lose(endpoint: Endpoint, now: float, *finders: Fleet) -> None:
    """Two probes of theirs find nobody."""
    for finder in finders:
        finder.on_probe_failed(endpoint.id, now - 0.5)
        finder.on_probe_failed(endpoint.id, now)


def test_what_one_finds_down_is_down_to_all_at_once() -> None:
    """A request of theirs would have to find it out again. What they know from each other is not told on."""
    ours, theirs, third = fleets(3)
    lose(ONE, 1.0, theirs)
    assert [load(of, 1.0).health for of in (ours, third)] == [Health.DOWN] * 2
    assert load(ours, 1.0, TWO).health is Health.UP
    assert load(ours, 1.0 + EJECTION).health is Health.PROBING  # and nobody keeps another's opinion alive


def test_our_own_probe_brings_back_what_others_cannot_reach() -> None:
    """One of several whose network is broken: it is tried, proves itself, and is not lost again to the same opinion."""
    ours, theirs = fleets()
    lose(ONE, 1.0, theirs)
    assert load(ours, 1.0).health is Health.DOWN
    ours.on_probe_answered(ONE.id, 1.3)
    assert load(ours, 1.3).health is Health.PROBING
    answer(ours, now=1.3)
    lose(ONE, 7.0, theirs)
    assert load(ours, 7.0).health is Health.UP
    assert load(theirs, 7.0).health is Health.DOWN


def test_an_opinion_ends_with_its_teller() -> None:
    """And is then worth a try, no more."""
    ours, theirs = fleets()
    lose(ONE, 1.0, theirs)
    assert load(ours, 1.0).health is Health.DOWN
    ours.on_peer_load(ONE.id, NO_LOAD, 2.0)
    assert load(ours, 2.0).health is Health.PROBING


def test_one_that_finds_most_of_a_pool_down_is_not_believed() -> None:
    """A lost network of its own: both of two endpoints, or the only endpoint."""
    ours, theirs = fleets()
    lose(API, 1.0, theirs)
    assert load(ours, 1.0, API).health is Health.UP
    lose(ONE, 1.0, theirs)
    assert load(ours, 1.0).health is Health.DOWN
    lose(TWO, 2.0, theirs)
    theirs.on_probe_failed(ONE.id, 2.1)  # the next look at the other
    assert [load(ours, 2.1, endpoint).health for endpoint in (ONE, TWO)] == [Health.PROBING, Health.UP]


def test_the_last_endpoint_of_a_pool_is_not_left_because_of_peer_reports() -> None:
    """Two that each find another half down would leave nothing."""
    ours, theirs, third = fleets(3)
    lose(ONE, 1.0, theirs)
    load(ours, 1.0)
    lose(TWO, 1.1, third)
    assert [load(ours, 1.1, endpoint).health for endpoint in (ONE, TWO)] == [Health.DOWN, Health.UP]


# --------------------------------------------------------------------------- prefixes


def test_a_prefix_that_a_sibling_sent_is_a_hit() -> None:
    """A conversation's next request may come to any of them."""
    ours, theirs = fleets()
    long = prompt(1600, blocks=100)
    send(theirs, long)
    load(ours)
    assert ours.hit(ONE, long) == theirs.hit(ONE, long) > 1500
    assert ours.hit(TWO, long) == 0


# --------------------------------------------------------------------------- sums


@given(st.lists(LOADS, max_size=4))
def test_burdens_add_up_in_any_order(loads: list[PeerLoad]) -> None:
    """And nothing beside them changes nothing."""
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
        ),  # the engine began with what was sent first
        (PrefillQueue(10, 100, 1, 5.0), 3.0, 4.0, PrefillQueue(30, 300, 3, 4.0)),  # a first token: that much is done
        (PrefillQueue(0, 0, 0, 1.0), 3.0, NEVER, PrefillQueue(20, 200, 2, 3.0)),  # an empty queue has no beginning
    ],
)
def test_two_queues_are_one(own: PrefillQueue, since: float, heard_at: float, expected: PrefillQueue) -> None:
    """First come, first served, whoever sent it."""
    theirs = replace(
        NO_LOAD, in_flight=1, prefilling=1, queued_tokens=20, queued_pairs=200, queued_remainder=2, queued_since=since
    )
    assert theirs.joined_with(own, heard_at) == expected
    assert NO_LOAD.joined_with(own, heard_at) == own
