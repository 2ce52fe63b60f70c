"""When a stream that has fallen behind is moved, and to which peer."""

from __future__ import annotations

from typing import Any

import pytest

from policies.attempts.attempt_events import AttemptLimits, PeerForecast, Progress
from policies.attempts.committed_stream import SOON
from policies.attempts.pace_watch import HANDOVER, MAX_MOVES, WINDOW, PaceWatch, Peers, Target
from policies.types import FOREVER
from tests.support.attempt_script import B, C

NEAR = PeerForecast(p50=0.1, p90=0.2, tpot=0.02)  # and so due after 0.7 s, of a budget of 1 s
AT = 100.0  # s, the latest token


def limits(**more: Any) -> AttemptLimits:
    known = {"gap": 1.0, "tpot": 0.05, "rescue": True, "by_pace": True, "expected_output": 200, **more}
    return AttemptLimits(max_attempts=4, **known)


def watch(**more: Any) -> PaceWatch:
    found = PaceWatch.of(limits(**more))
    assert found is not None
    return found


def silent(seconds: float, *peers: PeerForecast, watching: PaceWatch | None = None, **stream: Any) -> Target | float:
    """The finding of a look after so many seconds without a token; a time is counted from the latest token."""
    progress = Progress(**{"token_at": AT, "tokens": 50.0, "tpot": 0.02, **stream})
    known: Peers = list(zip((B, C), peers, strict=False))
    found = (watching or watch()).look(progress, lambda: known, AT + seconds)
    return found if isinstance(found, Target) else found - AT


def written(tokens: float, *peers: PeerForecast, **more: Any) -> Target | float:
    """The finding of a look after a window in which so many tokens came, the last of them just now."""
    watching, known = watch(**more), list(zip((B, C), peers, strict=False))
    for at, count in ((AT, 50.0), (AT + WINDOW, 50.0 + tokens)):
        found = watching.look(Progress(token_at=at, tokens=count, tpot=0.02), lambda: known, at)
    return found


# --------------------------------------------------------------------------- silence


def test_a_silent_stream_moves_while_the_peers_first_token_keeps_the_budget() -> None:
    """Its p90, and the time to hand over."""
    assert silent(0.6, NEAR) == pytest.approx(1.0 - NEAR.p90 - HANDOVER)
    found = silent(0.71, NEAR)
    assert isinstance(found, Target)
    assert found.candidate is B


@pytest.mark.parametrize(
    ("peer", "tpot", "after"),
    [
        (PeerForecast(0.01, 0.02, 0.02), 0.02, 0.88),
        (PeerForecast(0.1, 0.6, 0.02), 0.02, 0.5),
        (PeerForecast(0.6, 0.9, 0.02), 0.02, 1.2),
        (PeerForecast(3.0, 4.0, 0.02), 0.02, 6.0),
        (PeerForecast(0.01, 0.02, 0.02), 0.2, 4.0),
    ],
    ids=[
        "late where the peer is quick",
        "never before half of the budget",
        "after twice the peer's median TTFT: the budget is lost, and the rest is not",
        "a slow peer is worth a long wait",
        "after 20 of the stream's own gaps",
    ],
)
def test_a_silence_is_weighed_against_the_cost_of_the_move(peer: PeerForecast, tpot: float, after: float) -> None:
    assert isinstance(silent(after - 0.01, peer, tpot=tpot), float)
    assert isinstance(silent(after + 0.01, peer, tpot=tpot), Target)


def test_peers_are_not_asked_for_before_half_of_the_budget() -> None:
    """Nearly every look ends here."""

    def nobody() -> Peers:
        raise AssertionError("peers were asked for")

    assert watch().look(Progress(token_at=AT, tokens=9.0), nobody, AT + 0.4) == AT + 0.5


def test_a_peer_that_is_as_silent_is_no_peer() -> None:
    """All engines stand still: nothing moves, and no peer takes over by the rule of a break either."""
    watching = watch()
    assert isinstance(silent(3.0, PeerForecast(0.1, 0.2, 0.02, silent=2.9), watching=watching), float)
    assert watching.lost
    assert isinstance(silent(3.0, PeerForecast(0.1, 0.2, 0.02, silent=0.2), watching=watching), Target)
    assert not watching.lost


def test_the_soonest_of_several_peers_is_taken() -> None:
    found = silent(0.9, PeerForecast(0.1, 0.2, 0.08), PeerForecast(0.2, 0.3, 0.02))
    assert isinstance(found, Target)
    assert found.candidate is C


def test_without_a_peer_the_look_is_repeated() -> None:
    assert silent(0.9) == pytest.approx(1.4)


@pytest.mark.parametrize("state", [{"paused": True}, {"complete": True}, {"obstacle": "a tool call"}])
def test_a_stream_that_nobody_waits_for_or_can_continue_stays(state: dict[str, Any]) -> None:
    assert isinstance(silent(9.0, NEAR, **state), float)


# --------------------------------------------------------------------------- pace


def test_a_stream_at_a_tenth_of_the_promised_pace_moves() -> None:
    assert isinstance(written(4, NEAR), Target)


@pytest.mark.parametrize(
    ("tokens", "peer", "more"),
    [
        (40, NEAR, {}),
        (4, PeerForecast(0.1, 0.2, tpot=0.3), {}),
        (4, PeerForecast(0.1, 0.2, tpot=0.02, silent=1.5), {}),
        (4, PeerForecast(50.0, 60.0, tpot=0.02), {}),
        (4, NEAR, {"tpot": None}),
        (4, PeerForecast(0.1, 0.3, tpot=0.02), {"output_cap": 55}),
    ],
    ids=[
        "it keeps the promise",
        "the peer takes more than half of the time for the rest",
        "the peer is silent",
        "the peer's first token comes too late to gain anything",
        "the route promises no pace",
        "one token is left",
    ],
)
def test_a_slow_stream_stays_where_a_move_gains_nothing(
    tokens: float, peer: PeerForecast, more: dict[str, Any]
) -> None:
    assert isinstance(written(tokens, peer, **more), float)


def test_a_window_in_which_the_caller_did_not_read_shows_no_pace() -> None:
    watching = watch()
    watching.look(Progress(token_at=AT, tokens=50.0), list, AT)
    later = Progress(token_at=AT + WINDOW, tokens=51.0, reading_since=AT + 1.0)
    assert isinstance(watching.look(later, lambda: [(B, NEAR)], AT + WINDOW), float)


def test_the_next_look_is_at_the_end_of_the_window_at_the_latest() -> None:
    """However long a silence the route allows."""
    watching = watch(gap=20.0)
    assert watching.look(Progress(token_at=AT, tokens=50.0), list, AT) == AT + WINDOW


# --------------------------------------------------------------------------- bounds


@pytest.mark.parametrize("more", [{"gap": FOREVER}, {"rescue": False}, {"by_pace": False}])
def test_nothing_is_watched_without_a_promise_or_without_a_peer_by_pace(more: dict[str, Any]) -> None:
    assert PaceWatch.of(limits(**more)) is None


def test_a_stream_moves_twice_at_most_and_never_by_its_last_attempt() -> None:
    watching = watch()
    assert [watching.may_move(opened) for opened in (1, 2, 3, 4)] == [True, True, False, False]
    watching.moves = MAX_MOVES
    assert not watching.may_move(1)


def test_no_look_follows_at_once() -> None:
    assert silent(0.899999, PeerForecast(0.0, 0.0, 0.02)) == pytest.approx(0.899999 + SOON)
