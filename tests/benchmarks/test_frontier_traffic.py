"""Traffic of the scenarios beyond plain traces: the published statistics, and the faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest

from benchmarks import frontier_traffic as frontier
from benchmarks.frontier_traffic import TRAFFIC
from benchmarks.scenarios import HERE, SCENARIOS, arrivals, setting
from lab.replay.player import play
from lab.traffic.traces import Arrival, SeenBlocks

pytestmark = pytest.mark.virtual_time
SOURCES = ("arXiv:", "Azure/AzurePublicDataset", "kvcache-ai/Mooncake")


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Short traces of the recorded formats: ten requests per second for ten minutes."""
    turn = '{{"timestamp": {}, "input_length": 2000, "output_length": 40, "hash_ids": [1, 2, {}]}}\n'
    ticks = "".join(turn.format(n // 10 * 1_000, 100 + n) for n in range(6_000))
    (tmp_path / "mooncake_conversation.jsonl").write_text(ticks)
    rows = (f"2023-11-16 18:{n // 600:02}:{n % 600 / 10:06.3f}0000,600,40" for n in range(6_000))
    (tmp_path / "azure2023_conv.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return tmp_path


@pytest.mark.parametrize("name", TRAFFIC)
def test_equal_seeds_give_equal_requests_and_others_do_not(name: str, traces: Path) -> None:
    """In order of time, each for a route of the fleet; twice the load is about twice the requests per second."""
    made = [arrivals(name, load, traces, seed) for load, seed in ((0.2, 1), (0.2, 1), (0.2, 2), (0.4, 1))]
    assert made[0] == made[1] != made[2]
    assert {arrival.route for arrival in made[0]} <= setting(name).routes.keys()
    for each in made:
        assert [arrival.at for arrival in each] == sorted(arrival.at for arrival in each)
    rates = [len(each) / (each[-1].at - each[0].at) for each in made]
    assert rates[3] / rates[0] == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize("name", TRAFFIC)
def test_a_scenario_names_its_source_and_what_is_not_played(name: str) -> None:
    """In the comment above its fleet."""
    comment = [line for line in (HERE / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
    assert any(source in "\n".join(comment) for source in SOURCES)
    assert any(line.startswith("# Not played: ") for line in comment)
    assert f"({name})" in comment[0]


@pytest.mark.parametrize("name", TRAFFIC)
def test_a_scenario_has_the_clairvoyant_reference(name: str, traces: Path) -> None:
    """And the requests of a light moment are served by it."""
    assert "reference" in SCENARIOS[name].scorers
    offered = arrivals(name, 0.2, traces, 1)[:60]
    results = play(replace(setting(name), faults=()).with_scorer("reference"), offered)
    assert results.overall().good > 0.9


# --------------------------------------------------------------------------- lengths


def test_reasoning_has_the_lengths_that_were_published() -> None:
    """Of all clients of DeepSeek-R1 in ServeGen: 1,268 and 1,527 tokens on average, 208 and 792 in the middle."""
    made = [arrival for seed in range(8) for arrival in frontier.reasoning(20.0, Path(), seed)]
    prompts = [arrival.prompt_tokens for arrival in made]
    outputs = [arrival.output_tokens for arrival in made]
    assert fmean(prompts) == pytest.approx(1268, rel=0.1)
    assert fmean(outputs) == pytest.approx(1527, rel=0.1)
    assert (median(prompts), median(outputs)) == (pytest.approx(208, rel=0.1), pytest.approx(792, rel=0.1))
    assert max(outputs) == frontier.LONGEST_ANSWER == made[0].max_tokens


def test_questions_find_four_fifths_of_their_tokens_asked_before() -> None:
    """As L-Eval in Mooncake's table: 19,019 tokens and 72 of answer on average, more than 80% cached."""
    seen, made = SeenBlocks(), frontier.documents(40.0, Path(), 1)
    late = [(seen.new_tokens(arrival), arrival) for arrival in made if arrival.at]
    steady = [(new, arrival) for new, arrival in late if arrival.at > 90]  # the first questions precede the replay
    assert 1 - sum(new for new, _ in steady) / sum(arrival.prompt_tokens for _, arrival in steady) > 0.8
    assert fmean(arrival.prompt_tokens for arrival in made) == pytest.approx(19_019, rel=0.06)
    assert fmean(arrival.output_tokens for arrival in made) == pytest.approx(72, rel=0.1)


def test_the_first_adapter_is_twice_as_popular_as_the_second(traces: Path) -> None:
    """A power law: the n-th with a share of 1 / n. All sixty are asked for."""
    asked = [arrival.route for seed in range(6) for arrival in frontier.adapters(4.0, traces, seed)]
    counts = [asked.count(name) for name in frontier.ADAPTERS]
    assert counts[0] / counts[1] == pytest.approx(2.0, rel=0.1)
    assert counts[0] / counts[9] == pytest.approx(10.0, rel=0.15)
    assert min(counts) > 0


def test_every_engine_of_the_upgrade_can_hold_every_prompt() -> None:
    """Beside an answer of its usual length."""
    smallest = min(profile.kv_tokens for profile in setting("upgrade").profiles.values())  # type: ignore[union-attr]
    assert smallest > frontier.LONGEST_PROMPT * 2


# --------------------------------------------------------------------------- faults


def test_an_upgrade_restarts_every_engine_once_and_an_eighth_at_a_time() -> None:
    """Of each kind of engine alike, and before the replay ends."""
    fleet = setting("upgrade")
    killed = [fault for fault in fleet.faults if fault.kind == "kill"]
    back = {fault.endpoint: fault.at for fault in fleet.faults if fault.kind == "restart"}
    assert sorted(fault.endpoint for fault in killed) == sorted(back) == sorted(fleet.profiles)
    for at in {fault.at for fault in killed}:
        down = [fault.endpoint for fault in killed if fault.at <= at < back[fault.endpoint]]
        assert sorted(fleet.profiles[endpoint].name for endpoint in down) == ["8b-a100"] * 3 + ["8b-h100"] * 4 + [
            "8b-l4"
        ]
    assert max(back.values()) <= frontier.UPGRADE_SECONDS


def test_the_lost_region_is_the_nearer_one() -> None:
    """All of its engines at once, and no other; the rest is a round trip further away."""
    fleet = setting("region")
    near = {endpoint.id for pool in fleet.pools for endpoint in pool.endpoints if endpoint.locality == frontier.NEAR}
    assert {fault.endpoint for fault in fleet.faults} == near != fleet.profiles.keys()
    took = {}
    for endpoint in (min(near), min(fleet.profiles.keys() - near)):
        [pool] = fleet.pools
        kept = tuple(each for each in pool.endpoints if each.id == endpoint)
        alone = replace(fleet, pools=(replace(pool, endpoints=kept),), faults=())
        [result] = play(
            replace(alone, profiles={endpoint: fleet.profiles[endpoint]}), [Arrival(1.0, 100, 2, (), "agent")]
        ).requests
        took[endpoint in near] = result.ttft
    assert took[False] - took[True] == pytest.approx(frontier.ROUND_TRIP, abs=0.005)  # type: ignore[operator]


def test_a_crowd_comes_five_times_as_often_within_20_seconds(traces: Path) -> None:
    """Before, at the height, and after; no request is lost or added."""
    made = [arrival.at for arrival in frontier.crowd(1.0, traces, 1)]
    rates = [sum(begin <= at < end for at in made) / (end - begin) for begin, end in ((0, 50), (70, 100), (120, 150))]
    assert rates == [pytest.approx(10, rel=0.05), pytest.approx(50, rel=0.05), pytest.approx(10, rel=0.05)]
    assert frontier.surged(0.0) == 0.0
    assert frontier.surged(50.0) == 50.0
    assert frontier.surged(50.0 + 20.0) == pytest.approx(60.0)  # 10 s at twice the rate on average
    assert frontier.surged(50.0 + 60.0) == pytest.approx(70.0)  # 20 s at three times the rate on average
