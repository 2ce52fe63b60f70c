"""Requests of the access log, and the prefixes that their prompts share."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from gateway.observe.record import AttemptRecord, RequestOutcome
from gateway.observe.record_columns import RECORD
from lab.traffic.access_log import BLOCKS, LoggedRequest, PromptChains, block_of, logged_request
from lab.traffic.traces import TraceError, logged_arrivals, read_log, read_trace
from policies.prefix_doctor.lineage import Lineage, Link
from policies.types import AttemptKind, AttemptOutcome
from tests.support.builders import record

BLOCK = 32


def logged(number: int = 0, prompt: int = 1_250, landmarks: Sequence[int] = (1, 2), **more: Any) -> LoggedRequest:
    """500 tokens per landmark."""
    known = {"wall": float(number), "prompt_tokens_estimated": prompt, "prefix": array("Q", landmarks), **more}
    found = logged_request(RECORD.view(record(**known)), number)
    assert found is not None
    return found


def shared(requests: Sequence[LoggedRequest], one: int, other: int) -> int:
    """Tokens at the beginning of two prompts with equal hashes."""
    chains = PromptChains(requests, BLOCK)
    pair = zip(chains.chain(requests[one])[0], chains.chain(requests[other])[0], strict=False)
    return next((i for i, (a, b) in enumerate(pair) if a != b), 10**6) * BLOCK


def test_prompts_share_their_common_landmarks() -> None:
    """Whole blocks of 500 tokens per landmark; what follows is unique."""
    requests = [logged(0), logged(1), logged(2, landmarks=(1, 3))]
    assert shared(requests, 0, 1) == pytest.approx(1_000, abs=BLOCK)
    assert shared(requests, 0, 2) == pytest.approx(500, abs=BLOCK)


def test_what_an_engine_found_cached_is_shared_behind_the_last_common_landmark() -> None:
    """The system prompt ends within a landmark: the engine tells where. An engine that has lost it tells nothing."""
    requests = [logged(0, landmarks=(1, 2)), *(logged(n, landmarks=(1, n)) for n in (3, 4, 5))]
    cold = [
        requests[0],
        *(logged(n, landmarks=(1, n), cached_tokens_reported=c) for n, c in ((3, 704), (4, 0), (5, 704))),
    ]
    assert shared(requests, 1, 3) == pytest.approx(500, abs=BLOCK)
    assert shared(cold, 1, 3) == pytest.approx(704, abs=BLOCK)
    assert shared(cold, 0, 2) == pytest.approx(704, abs=BLOCK)


def test_lines_of_the_same_number_in_two_logs_share_nothing_unknown(tmp_path: Path) -> None:
    """Several logs are replayed at once: a prompt without a landmark is its own in each."""
    found = []
    for name, wall in (("a", 100.0), ("b", 900.0)):
        row = RECORD.view(record(wall=wall, prompt_tokens_estimated=400, output_tokens=9, end=RequestOutcome.COMPLETED))
        (tmp_path / name).write_text(json.dumps(row))
        (arrival,) = read_trace(tmp_path / name)
        found.append({*arrival.hashes})
    assert len(found[0]) == 400 // BLOCKS[0]
    assert not found[0] & found[1]


def test_callers_share_nothing_that_no_landmark_shows() -> None:
    """Caches of two keys are apart; their short prompts have no landmark."""
    found = [logged(n, 300, (), cached_tokens_reported=256, tenant=name) for n, name in enumerate(("a", "a", "b"))]
    assert shared(found, 0, 1) == pytest.approx(256, abs=BLOCK)
    assert shared(found, 0, 2) == 0


def test_the_next_turn_finds_the_answer_cached() -> None:
    """An engine keeps the blocks of an answer; the next prompt begins with it."""
    first, then = logged(0, 1_250, (1, 2), output_tokens=200), logged(1, 1_750, (1, 2, 3), cached_tokens_reported=1_440)
    chains = PromptChains([first, then], BLOCK)
    prompt, answer = chains.chain(first)
    both = [*prompt, *answer]
    assert len(both) * BLOCK == pytest.approx(1_440, abs=2 * BLOCK)
    assert list(chains.chain(then)[0][: len(both)]) == both


def turns(*tenants: str) -> list[LoggedRequest]:
    """Two turns of a conversation, the first with an answer of 200 tokens, and another conversation's first."""
    mine = Lineage(conversation=5, template=6)
    then, other = replace(mine, link=Link.CONVERSATION, kept=900), Lineage(7, 6, link=Link.TEMPLATE, kept=300)
    names = iter(tenants or ("a", "a", "a"))
    return [
        logged(0, 900, (1,), output_tokens=200, lineage=mine, tenant=next(names)),
        logged(1, 1_250, (1, 2), lineage=then, tenant=next(names)),
        logged(2, 800, (8,), lineage=other, tenant=next(names)),
    ]


def test_a_prompt_begins_with_what_was_kept_of_the_one_before() -> None:
    """To the token, between landmarks too; of a conversation with the answer."""
    chains = PromptChains(turns(), BLOCK)
    prompt, answer = chains.chain(turns()[0])
    second, third = (chains.chain(each)[0] for each in turns()[1:])
    assert list(second[: 1_100 // BLOCK]) == [*prompt, *answer]
    assert list(third[: 300 // BLOCK]) == list(prompt[: 300 // BLOCK])
    assert not {*third[300 // BLOCK :]} & {*prompt, *answer, *second}


def test_what_is_kept_is_what_the_engine_found_to_its_block() -> None:
    """The gateway counts kept tokens in blocks of its own, of about 30. Of 600 tokens of a template, 30 too few are 6%
    of the prompts of an overload: it is another overload."""
    requests = [
        logged(n, 1_000, (n,), cached_tokens_reported=cached, lineage=Lineage(n, 9, link=link, kept=kept))
        for n, cached, link, kept in (
            (0, 0, Link.TEMPLATE, 585),  # the first to arrive, not the first to end
            (1, 592, Link.NONE, None),
            (2, 592, Link.TEMPLATE, 571),
            (3, None, Link.TEMPLATE, 585),  # refused
            (4, 0, Link.TEMPLATE, 588),  # of an engine that has lost it
            (5, None, Link.TEMPLATE, 200),  # another beginning
        )
    ]
    chains = PromptChains(requests, 16)
    first, *others = (chains.chain(each)[0] for each in requests)
    shared_tokens = [16 * sum(a == b for a, b in zip(first, other, strict=True)) for other in others]
    assert shared_tokens == [592, 592, 592, 592, 192]


def test_equal_hashes_mean_equal_prompts_up_to_there() -> None:
    """A landmark behind other tokens is none: the index of the caches relies on it."""
    one = logged(0, 1_250, (1, 2), lineage=Lineage(conversation=5))
    edited = logged(1, 1_250, (1, 2), lineage=Lineage(5, link=Link.CONVERSATION, kept=200))
    again = logged(2, 1_250, (1, 2), lineage=Lineage(9))
    chains = PromptChains([one, edited, again], BLOCK)
    all_hashes = [chains.chain(each)[0] for each in (one, replace(edited, landmarks=(7, 2)), again)]
    for hashes in all_hashes:
        for other in all_hashes:
            equal = [a == b for a, b in zip(hashes, other, strict=True)]
            assert equal == sorted(equal, reverse=True)


def test_a_turn_of_a_log_comes_as_long_after_the_answer_before_as_it_did() -> None:
    """Its caller was waiting for that answer: a slower replay gets it later. One that came before the end is a request
    of its own time, and so is one of another caller, of another route, or without a conversation."""
    mine, others = Lineage(conversation=5), {"tenant": "b", "lineage": Lineage(conversation=5)}
    requests = [
        logged(0, lineage=mine, total=3.0),
        logged(1, lineage=mine, total=0.5),
        logged(2, **others),
        logged(4, lineage=mine),
        logged(5),
    ]
    arrivals = logged_arrivals(requests)
    assert [(each.session, each.follows) for each in arrivals] == [
        (1, False),
        (1, False),
        (2, False),
        (1, True),
        (0, False),
    ]
    assert arrivals[3].think == pytest.approx(4.0 - 1.5)


def test_callers_of_the_same_words_share_nothing() -> None:
    """The name of a conversation is a hash of its text, and caches of two keys are apart."""
    requests = turns("a", "b", "b")
    chains = PromptChains(requests, BLOCK)
    first, second, _ = (chains.chain(each)[0] for each in requests)
    assert len({*first} & {*second}) * BLOCK < 600  # of the equal landmark


def test_hashes_of_all_prompts_stay_bounded() -> None:
    """Long logs get longer blocks."""
    assert block_of([logged()]) == BLOCKS[0]
    assert block_of([logged(prompt=400_000)] * 5_000) == BLOCKS[-1]


def test_answers_that_later_turns_share_count_for_the_bound_too() -> None:
    """A conversation's answer has a hash per block, as its prompt has: memory is bounded for logs of long answers."""
    lineage = Lineage(conversation=1)
    assert block_of([logged(prompt=100, output_tokens=400_000, lineage=lineage)] * 5_000) == BLOCKS[-1]
    assert block_of([logged(prompt=100, output_tokens=400_000)] * 5_000) == BLOCKS[0]


def test_an_arrival_knows_what_the_caller_asked_and_who_it_was() -> None:
    """Fair share and expected lengths are decided by them."""
    (found,) = logged_arrivals([logged(tenant="team-a", max_tokens=40, stream=False)])
    assert (found.tenant, found.max_tokens, found.stream, found.block) == ("team-a", 40, False, BLOCKS[0])


def test_the_attempt_that_won_has_the_time_to_its_first_token() -> None:
    """From its opening, without the gateway's own relay; of an answer of another
    endpoint there is none."""
    lost = AttemptRecord(1, AttemptKind.PRIMARY, "small/b", "small", 0.01, 0.05, AttemptOutcome.FAILED)
    won = AttemptRecord(2, AttemptKind.FALLBACK, "small/a", "small", 0.05, 1.0, AttemptOutcome.COMPLETED)
    found = logged(attempts=[lost, won], ttft=0.2, spent=[None] * 11 + [0.01, None])
    assert found.winner is found.attempts[1]
    assert found.upstream == pytest.approx(0.14)
    assert logged(attempts=[won, lost], ttft=0.2).winner is None


def test_faults_of_callers_and_answers_of_the_cache_are_no_load() -> None:
    """Engines never saw them."""
    for row in (record(end="refused"), record(cache="hit", prompt_tokens_estimated=9)):
        assert logged_request({**RECORD.view(row), "prompt_tokens_estimated": 9}, 1) is None


@pytest.mark.parametrize("tokens", [-5, 10**12])
def test_a_prompt_of_no_possible_length_is_an_error(tokens: int) -> None:
    """A broken line would otherwise take all memory."""
    with pytest.raises(ValueError, match=r"a prompt of|prompt_tokens_estimated is"):
        logged(prompt=tokens)


@pytest.mark.parametrize("value", [nan, inf, -5, 1e300, "9", [1]])
def test_a_number_of_a_log_that_is_none_is_an_error_of_its_line(tmp_path: Path, value: Any) -> None:
    """Of each: an endless replay, or an internal error, was the alternative."""
    attempt = {"endpoint": "main/e", "opened_ms": 1.0, "ended_ms": 900.0, "ending": "won", "engine_kv_tokens": 9_000}
    row = {
        "wall": 5.0,
        "route": "chat",
        "end": "completed",
        "prompt_tokens_reported": 900,
        "prompt_tokens_estimated": 880,
        "kept_tokens": 100,
        "output_tokens": 50,
        "max_tokens": 100,
        "cached_tokens_reported": 0,
        "ttft_ms": 200.0,
        "tpot_ms": 20.0,
        "stages_ms": {},
        "attempts": [attempt],
    }
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(row))
    assert len(read_log(path)) == 1
    numbers = [name for name, known in row.items() if isinstance(known, int | float)]
    hostile = [{**row, name: value} for name in numbers]
    hostile += [
        {**row, "attempts": [{**attempt, name: value}]} for name in ("opened_ms", "ended_ms", "engine_kv_tokens")
    ]
    hostile += [{**row, "stages_ms": {"relay": value}}]
    for each in hostile:
        path.write_text(json.dumps(each))
        with pytest.raises(TraceError, match=r"log\.jsonl:1: "):
            read_log(path)
