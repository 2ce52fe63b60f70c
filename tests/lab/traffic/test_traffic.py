"""Traces of the command line, on the routes of a configuration."""

from __future__ import annotations

import json
from collections import Counter
from operator import itemgetter
from pathlib import Path

import pytest

from gateway.observe.record_columns import RECORD
from lab.replay.player import followers
from lab.traffic.traces import AGENTS, TraceError
from lab.traffic.traffic import Traffic, TrafficSource
from policies.prefix_doctor.lineage import Lineage, Link
from tests.support.builders import record
from tests.support.replay_builders import agent_sessions, mooncake


def test_a_source_may_name_its_route() -> None:
    """ROUTE=TRACE; a path with an equals sign is no route."""
    assert TrafficSource.parse("chat=a.csv") == TrafficSource("a.csv", "chat")
    assert TrafficSource.parse("dir/x=1.csv") == TrafficSource("dir/x=1.csv")


def test_a_single_route_needs_no_name(tmp_path: Path) -> None:
    """With several routes, the trace or the command line names the route."""
    traffic = Traffic((TrafficSource(str(mooncake(tmp_path / "trace", 3))),))
    assert {a.route for a in traffic.arrivals({"agent"}, 1.0, 0)} == {"agent"}
    with pytest.raises(TraceError, match="names one of the routes agent, chat; write ROUTE=TRACE"):
        traffic.arrivals(["agent", "chat"], 1.0, 0)
    unknown = Traffic((TrafficSource(str(tmp_path / "trace"), "agnet"),))
    with pytest.raises(TraceError, match="no route 'agnet'; known: agent"):
        unknown.arrivals({"agent"}, 1.0, 0)


def test_several_sources_are_one_stream(tmp_path: Path) -> None:
    """All sources are merged in order of time and cut at --seconds."""
    one, two = mooncake(tmp_path / "one", 10, gap=1000), mooncake(tmp_path / "two", 10, gap=700)
    found = Traffic((TrafficSource(str(one)), TrafficSource(str(two))), seconds=2.0).arrivals({"agent"}, 1.0, 0)
    assert [a.at for a in found] == [0.0, 0.0, 0.7, 1.0, 1.4]


def test_made_up_sessions_become_more_not_faster() -> None:
    """Load multiplies the number of sessions; pauses within a session stay equal."""
    once, twice = (TrafficSource(AGENTS).arrivals(load, 3, None) for load in (1.0, 2.0))
    assert 1.5 < len(twice) / len(once) < 2.5
    assert twice[-1].at > 800


def conversations(path: Path) -> Path:
    """A log of 40 conversations of three turns, each of which comes 2 s after the answer before."""
    rows = [
        RECORD.view(
            record(
                wall=float(start) + 3.0 * step,
                total=1.0,
                prompt_tokens_estimated=1_000,
                lineage=Lineage(conversation=start + 1, step=step + 1, kept=900, link=Link.CONVERSATION),
            )
        )
        for start in range(40)
        for step in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in sorted(rows, key=itemgetter("wall"))))
    return path


def test_conversations_of_a_log_become_more_not_faster(tmp_path: Path) -> None:
    """A turn waits for the answer before: turns would keep their pace, however soon conversations began, and a fleet
    would carry any multiple of them."""
    source = TrafficSource(str(conversations(tmp_path / "access.log")))
    once, twice, half = (source.arrivals(load, 3, None) for load in (1.0, 2.0, 0.5))
    assert sum(each.follows for each in once) == 80
    assert len(twice) == 2 * len(once)
    assert 0.25 < len(half) / len(once) < 0.75
    for found in (twice, half):
        assert found[-1].at > 30.0
        assert len(followers(found)) == sum(each.follows for each in found)
        assert {count % 3 for count in Counter(each.session for each in found).values()} == {0}


# ---------------------------------------------------------------- sessions


def test_recorded_sessions_start_at_a_rate(tmp_path: Path) -> None:
    """`rate` times the load, for 600 s unless --seconds says otherwise; a higher load means more sessions."""
    path = TrafficSource(str(agent_sessions(tmp_path / "sessions.jsonl")))
    once = Traffic((path,), rate=0.5).arrivals({"agent"}, 1.0, 0)
    short = Traffic((path,), rate=0.5, seconds=100.0).arrivals({"agent"}, 2.0, 0)
    assert max(arrival.at for arrival in once) > 550
    assert len({arrival.session for arrival in once}) == pytest.approx(300, rel=0.15)
    assert len({arrival.session for arrival in short}) == pytest.approx(100, rel=0.25)
    assert max(arrival.at for arrival in short) < 100
    assert not any(arrival.follows for arrival in once)


@pytest.mark.parametrize("synthetic", [False, True])
def test_in_a_closed_loop_all_turns_but_the_first_follow(tmp_path: Path, synthetic: bool) -> None:
    """Of recorded and of synthetic sessions; other traces stay as recorded."""
    trace = AGENTS if synthetic else str(agent_sessions(tmp_path / "sessions.jsonl"))
    sources = TrafficSource(trace), TrafficSource(str(mooncake(tmp_path / "trace", 5)))
    found = Traffic(sources, seconds=300.0, closed=True).arrivals({"agent"}, 1.0, 0)
    begun = set[int]()
    for arrival in found:
        assert arrival.follows == (arrival.session in begun)
        begun |= {arrival.session} - {0}
    assert sum(arrival.session == 0 for arrival in found) == 5
    assert sum(arrival.follows for arrival in found) > 50


def test_two_sources_never_share_a_session(tmp_path: Path) -> None:
    """The same file twice, as on two routes: neither numbers nor the content of sessions coincide."""
    path = agent_sessions(tmp_path / "sessions.jsonl")
    sources = TrafficSource(str(path), "agent"), TrafficSource(str(path), "chat")
    found = Traffic(sources, rate=0.2, seconds=100.0).arrivals({"agent", "chat"}, 1.0, 0)
    numbers, blocks = (
        [
            {value for arrival in found if arrival.route == name for value in values(arrival)}
            for name in ("agent", "chat")
        ]
        for values in (lambda arrival: (arrival.session,), lambda arrival: arrival.hashes[1:])
    )
    assert all(numbers)
    assert (numbers[0] & numbers[1], blocks[0] & blocks[1]) == (set(), set())


def test_a_closed_loop_needs_sessions(tmp_path: Path) -> None:
    """Requests without a session have no turn before."""
    traffic = Traffic((TrafficSource(str(mooncake(tmp_path / "trace", 5))),), closed=True)
    with pytest.raises(TraceError, match="--closed: no trace holds sessions"):
        traffic.arrivals({"agent"}, 1.0, 0)
