"""Breaks of prefixes in recorded agent sessions, found from what the gateway reads of its requests anyway."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from backends.interface import Operation
from gateway.api.inference_request import InferenceRequest, parse
from gateway.observe.record import Record
from gateway.observe.timeline import LANDMARK
from gateway.parts.prefix_doctor.part import COMPOSITION, LINEAGE, MOST_MESSAGES, PrefixDoctor, PromptCounts
from gateway.tokenize.estimator import Estimator
from gateway.tokenize.prompt_reader import PromptText, TokenizerConfig
from gateway.tokenize.tokenizers import encoder
from policies.latency.token_counts import TokenScale
from policies.prefix_doctor.lineage import Lineage
from policies.prefix_doctor.prefix_ledger import NO_LINEAGE
from policies.prompt_outline import Composition
from policies.types import Candidate, Decision, Endpoint, Forecast, Placement, PoolEstimate, Price
from tests.support.agent_prompts import PLANTS, AgentTurn, agent_turns
from tests.support.builders import record

FIVE_MINUTES = 300.0
TEMPLATE = 4
PREFILL = 0.0001  # s a token


class Watched:
    """A doctor, and the estimator in front of it."""

    def __init__(self) -> None:
        self.doctor = PrefixDoctor(lambda pool: Price(input=2.0, cached_input=0.5))
        config = TokenizerConfig("o200k_base", template=TEMPLATE)
        self.estimator = Estimator({"small": config}, lambda name: TokenScale())

    def estimate(self, request: InferenceRequest, *, counted: bool = False) -> PoolEstimate:
        text = PromptText(request.prompt, ("small",))
        if counted:
            for _ in self.estimator.count(text):
                pass
        return self.estimator.estimate(text).pools["small"]

    def answer(
        self, body: Mapping[str, Any], at: float = 0.0, caller: str = "team-a", headers: Mapping[str, str] = {}
    ) -> Record:
        """The Record of a request that was answered."""
        request = parse(Operation.CHAT, json.dumps(body).encode(), headers, at, f"req-{at}")
        request.caller = caller
        estimate = self.estimate(request)
        for _ in self.estimator.count(PromptText(request.prompt, ("small",))):
            pass  # as the gateway does once the request is sent
        return self.end(request, estimate, at)

    def end(self, request: InferenceRequest, estimate: PoolEstimate, at: float) -> Record:
        made = record(
            arrival=at, wall=1.7e9 + at, prompt_tokens_estimated=estimate.tokens, prompt_changes=request.prompt_changes
        )
        step = LANDMARK // estimate.blocks.size
        made.prefix = estimate.blocks.hashes[step - 1 :: step]
        endpoint, spent = Endpoint("small/a", "small"), Forecast(0.2, prefill=PREFILL * estimate.tokens)
        best = Candidate(endpoint, 0, estimate.tokens, 0, spent, 1.0, 0.0)
        made.decision = Decision(Placement.PLACE, at, 0.0, [best])
        self.doctor.on_ended(made, request, estimate)
        return made

    def places(self, caller: str = "team-a") -> Sequence[Mapping[str, Any]]:
        found = [each for each in self.doctor.advice()["callers"] if each["caller"] == caller]
        return found[0]["places"] if found else []


def exact_position(turn: AgentTurn, other: AgentTurn) -> int:
    """Tokens before the first character that differs between two turns, by the tokenizer."""
    count = encoder("o200k_base").count
    one, two = (json.dumps(each.body["tools"], separators=(",", ":")) for each in (turn, other))
    if one != two:
        return count(one[: _first_difference(one, two)])
    texts = [each.body["messages"][0]["content"] for each in (turn, other)]
    return count(one) + TEMPLATE + count(texts[0][: _first_difference(*texts)])


def _first_difference(one: str, two: str) -> int:
    return next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)


@pytest.mark.parametrize("kind", PLANTS)
def test_a_planted_break_is_found_with_position_and_class(kind: str) -> None:
    """In recorded agent sessions, within five minutes of traffic, by sessions that nobody names."""
    watched, turns = Watched(), [turn for turn in agent_turns(PLANTS[kind]) if turn.at < FIVE_MINUTES]
    for turn in turns:
        watched.answer(turn.body, turn.at)
    (place,) = watched.places()
    known = Counter(place["classes"])
    del known["unclassified"]
    assert {*known} == {kind}
    assert known[kind] >= 0.8 * place["breaks"] > 0.6 * len(turns)
    assert place["role"] == ("tools" if kind == "tool_order" else "system")
    if kind != "tool_order":  # whose first difference is another with every pair
        same_session = [turn for turn in turns if turn.session == 1][:2]
        assert place["at_tokens"] == pytest.approx(exact_position(*same_session), rel=0.02)


def test_calm_sessions_have_no_break() -> None:
    """The same without anything planted; each continues the turn before."""
    watched, turns = Watched(), agent_turns()
    found = [watched.answer(turn.body, turn.at) for turn in turns]
    assert watched.places() == []
    steps = Counter(LINEAGE.of(made).step for made in found)
    assert steps[1] == len({turn.session for turn in turns})
    assert max(steps) == max(Counter(turn.session for turn in turns).values())


# --------------------------------------------------------------------------- composition


def exact_composition(body: Mapping[str, Any]) -> Composition:
    """By the tokenizer, message by message."""
    count, found = encoder("o200k_base").count, dict.fromkeys(Composition._fields, 0)
    found["tools"] = count(json.dumps(body["tools"], separators=(",", ":"), ensure_ascii=False))
    last_answer = max((i for i, each in enumerate(body["messages"]) if each["role"] == "assistant"), default=-1)
    for i, message in enumerate(body["messages"]):
        calls = message.get("tool_calls", ())
        texts = [message["content"], *(f'{{"name": "{c["function"]["name"]}", "arguments": {{}}}}' for c in calls)]
        kinds = {"system": "system", "tool": "tool_results"}
        kind = kinds.get(message["role"], "last_turn" if i > last_answer else "history")
        found[kind] += TEMPLATE + sum(map(count, texts))
    return Composition(**found)


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "counted after the send"])
def test_the_composition_is_within_2_percent_of_the_exact_split(counted: bool) -> None:
    """Of every part, and of prompts that were counted only after they were sent."""
    watched = Watched()
    for turn in agent_turns(sessions=3):
        request = parse(Operation.CHAT, json.dumps(turn.body).encode(), {}, turn.at, "req")
        estimate = watched.estimate(request, counted=counted)
        if not counted:
            for _ in watched.estimator.count(PromptText(request.prompt, ("small",))):
                pass
        exact = exact_composition(turn.body)
        made = record(prompt_tokens_reported=round(sum(exact)))
        watched.doctor.on_ended(made, request, estimate)
        assert COMPOSITION.of(made) is not None
        for found, wanted in zip(COMPOSITION.of(made), exact, strict=True):
            assert found == pytest.approx(wanted, rel=0.02, abs=2)
        assert sum(COMPOSITION.of(made)) == round(sum(exact))


# --------------------------------------------------------------------------- callers, and bounds


def test_a_caller_is_told_nothing_of_the_prompts_of_another() -> None:
    """The same conversation under two keys: each has its own first step, and its own breaks alone."""
    watched, turns = Watched(), agent_turns(PLANTS["uuid"], sessions=1)[:4]
    for turn in turns:
        watched.answer(turn.body, turn.at, "team-a")
    other = watched.answer(turns[-1].body, 900.0, "team-b")
    assert (LINEAGE.of(other).step, LINEAGE.of(other).kept, LINEAGE.of(other).broken) == (
        1,
        None,
        None,
    )
    assert watched.places("team-b") == []
    assert watched.places("team-a")


def test_a_session_is_followed_by_its_name() -> None:
    """By the header of a client, with the time since the step before."""
    watched, turns = Watched(), agent_turns(sessions=1)[:2]
    first, second = (watched.answer(turn.body, turn.at, headers={"x-opencode-session": "ses_1"}) for turn in turns)
    assert (LINEAGE.of(first).step, LINEAGE.of(second).step) == (1, 2)
    assert LINEAGE.of(first).conversation == LINEAGE.of(second).conversation != 0
    assert LINEAGE.of(second).since == pytest.approx(turns[1].at - turns[0].at - first.total)


def tools_in_turn(shift: int, number: int, size: int) -> dict[str, Any]:
    """A prompt of the same tools in another order."""
    tools = [{"type": "function", "function": {"name": f"t{i}", "description": "x" * size}} for i in range(number)]
    return {"model": "m", "tools": tools[shift:] + tools[:shift], "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(("number", "told"), [(20, "tool_order"), (2000, "text")], ids=["2 KB", "300 KB"])
def test_the_order_of_large_tool_definitions_is_not_told(number: int, told: str) -> None:
    """To decode and hash each takes tens of milliseconds of the event loop; that the prefix breaks is told."""
    watched = Watched()
    ends = [
        LINEAGE.of(watched.answer(tools_in_turn(1 + shift, number, 100), float(shift))).broken for shift in range(4)
    ]
    assert ends[-1] is not None
    assert ends[-1].cls == told


def test_windows_of_a_second_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller with large prompts, each broken, does not hold the event loop; a new second reads again."""
    now, read = 100.0, list[int]()
    monkeypatch.setattr("gateway.parts.prefix_doctor.part.monotonic", lambda: now)
    monkeypatch.setattr("gateway.tokenize.prompt_reader.read_window", lambda prompt, *place: read.append(prompt.size))
    watched = Watched()
    for turn in range(9):
        text = f"id {turn} " + "word " * 100_000
        body = [{"role": "system", "content": text}, {"role": "user", "content": "hi " * 500}]
        assert LINEAGE.of(watched.answer({"model": "m", "messages": body}, float(turn))).broken is not None or turn == 0
        now += turn == 6
    assert [round(size, -5) for size in read] == [500_000] * 5


def test_a_prompt_of_many_thousand_messages_is_not_followed() -> None:
    """Each message costs a request microseconds of the event loop."""
    watched = Watched()
    body = {"model": "m", "messages": [{"role": "user", "content": str(i)} for i in range(MOST_MESSAGES + 1)]}
    assert COMPOSITION.of(watched.answer(body)) is None
    body["messages"] = body["messages"][1:]
    assert COMPOSITION.of(watched.answer(body)) is not None


def test_steps_of_sessions_are_counted_with_their_pause_and_what_they_kept() -> None:
    """By route; a prompt that was not followed, as a short one, is no step."""
    counts = PromptCounts()
    for lineage in (Lineage(7), Lineage(7, step=2, since=4.0, kept=450, previous=900), NO_LINEAGE):
        counts.count(record(lineage=lineage))
    samples = [each for family in counts.collect() for each in family.samples]
    found = {" ".join([each.name, *each.labels.values()]).replace(" chat", ""): each.value for each in samples}
    assert found["firsttoken_session_steps_bucket 1.0"] == 1
    assert found["firsttoken_session_steps_bucket +Inf"] == 2
    assert (found["firsttoken_session_steps_sum"], found["firsttoken_session_pause_seconds_sum"]) == (3, 4.0)
    assert found["firsttoken_session_kept_ratio_sum"] == 0.5
    assert found["firsttoken_session_kept_ratio_bucket +Inf"] == 1
