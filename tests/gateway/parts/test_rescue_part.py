"""The part that has broken streams continued: for whom it acts, and how many at a time."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backends.interface import BackendRequest, Operation
from backends.stream.partial_answer import PartialAnswer, TextBudget
from gateway.core.hooks import NO_HOOKS, RoutePlan
from gateway.observe.part_notes import RESCUE
from gateway.parts.rescue.rescue import Continuing, Rescue, Rescues
from policies.rescue.successors import RESCUE_ATTEMPT
from policies.types import FOREVER, Attempt, AttemptKind
from tests.gateway.upstream.test_routed_request import routed
from tests.support.builders import RecordingFleet, candidate, route, wire

ROOT = Path(__file__).parents[3]
OWN = Attempt(1, AttemptKind.PRIMARY, candidate("small/a"))
OTHERS = [candidate("small/b")]


def nothing(work: Any) -> None:
    raise AssertionError(work)


def plan(**on: Any) -> RoutePlan:
    return RoutePlan(cast("Any", None), route(**on), Operation.CHAT)


def rescues() -> Rescues:
    return Rescues(RecordingFleet(), nothing)


def recovery(**body: Any) -> Rescue:
    recover = rescues().on(plan(rescue="on")).recover
    assert recover is not None
    return cast("Rescue", recover(routed(on={"rescue": "on"}, **body)))


def test_the_answer_path_names_no_part() -> None:
    """It knows that the rest of a broken answer may come from others, that a whole one is judged, and asks a hook."""
    core = [*ROOT.glob("gateway/upstream/*.py"), *ROOT.glob("policies/attempts/*.py"), ROOT / "gateway/proxy.py"]
    assert len(core) > 10
    word = re.compile(r"rescue|continuation|partial_answer|TextBudget|escalat|answer_quality", re.IGNORECASE)
    assert [f"{path.name}: {found[0]}" for path in core if (found := word.search(path.read_text("utf-8")))] == []


def test_only_streams_of_routes_that_want_it_are_kept() -> None:
    assert rescues().on(plan(rescue="off")) is NO_HOOKS
    assert recovery(stream=True) is not None
    assert recovery(stream=False) is None


def test_a_stream_is_left_by_its_pace_unless_it_cannot_be_continued() -> None:
    """A parser of tool calls holds tokens back, and a tool call is continued by nobody."""
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    assert recovery(stream=True).patience(OWN, 0.01, OTHERS) == 2.0
    assert recovery(stream=True, tools=tools).patience(OWN, 0.01, OTHERS) == FOREVER
    kept = recovery(stream=True)
    kept.link().feed(b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\n\n')
    assert kept.patience(OWN, 0.01, OTHERS) == FOREVER


def test_the_text_kept_is_given_back_at_the_end() -> None:
    shared = rescues()
    recover = shared.on(plan(rescue="on")).recover
    assert recover is not None
    kept = cast("Rescue", recover(routed(on={"rescue": "on"}, stream=True)))
    kept.link().feed(b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n')
    assert shared.texts.used > 0
    kept.end(None)
    assert shared.texts.used == 0


@pytest.mark.virtual_time
async def test_continuations_of_broken_answers_are_asked_for_a_few_at_a_time() -> None:
    asked: list[str] = []
    go_on = asyncio.Event()

    class Asking(Continuing):
        async def continued(self, upstream: object, request: object, endpoint: str) -> BackendRequest:
            asked.append(endpoint)
            await go_on.wait()
            raise asyncio.CancelledError

    shared, of = rescues(), routed(stream=True)
    shared.take_overs = asyncio.Semaphore(2)
    tasks = []
    for number in range(5):
        broken = wire(shared.fleet, chosen=candidate(f"small/{number}"))
        rest = Asking(shared, of, PartialAnswer(TextBudget()), (), None)
        tasks.append(asyncio.create_task(rest.send(broken, cast("Any", None))))
    await asyncio.sleep(0)
    assert asked == ["small/0", "small/1"]
    go_on.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert asked == [f"small/{number}" for number in range(5)]


def test_an_endpoint_is_known_to_begin_anew_by_its_own_words_alone() -> None:
    """Where no peer has gone on, the attempt that broke is still the winner, and has continued nothing."""
    shared, of = rescues(), routed(stream=True)
    rest = Continuing(shared, of, PartialAnswer(TextBudget()), (), None)
    rest.continuation = cast("Any", SimpleNamespace(restarted_unasked=True))
    rest.end(wire(shared.fleet, chosen=candidate("small/a")))
    assert shared.restarting == set()
    peer = wire(shared.fleet, chosen=candidate("small/b"))
    peer.attempt = replace(peer.attempt, kind=RESCUE_ATTEMPT)
    rest.end(peer)
    assert shared.restarting == {"small/b"}


def test_a_rescue_is_refused_where_no_further_attempt_is_allowed_and_fails_where_none_could_be_made() -> None:
    """A peer at its cap is not asked: that is no word about the request."""
    shared, of = rescues(), routed(stream=True)
    rest = Continuing(shared, of, PartialAnswer(TextBudget()), (), None)
    RESCUE.put(of.timeline.record, "failed")
    rest.end(None)
    assert RESCUE.of(of.timeline.record) == "failed"
    rest.refuse()
    assert RESCUE.of(of.timeline.record) == "refused"
