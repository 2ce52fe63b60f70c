"""The scenarios of the routing benchmark: traffic and fleet.

The traces are public: `mooncake_conversation.jsonl` (kvcache-ai/Mooncake, FAST25 release), `azure2023_conv.csv`
and `azure2023_code.csv` (Azure/AzurePublicDataset, LLM inference 2023), and `agent_sessions.jsonl` (coding-agent
sessions of kv-cache-tester). At a load of 1 round robin meets the TTFT of half of the requests; `benchmarks.routing
--find` looks for the base. Of the recorded sessions, (e) and (e-closed), the load is the rate of new sessions per
second. All engines are empty at first, and most sessions last longer than SESSIONS_SECONDS, so these two show a
fleet that more and more sessions arrive at, not a steady state. Of (agents) the load is a share of AGENTS sessions at
a time, each followed by another: a level rate of requests, which shows how a cold start differs from the time after it.
`benchmarks.frontier_traffic` makes the traffic of the last six, and names its sources. The load of (upgrade) is not
that of round robin: 64 engines at 15 times the pace of the trace, at which round robin meets the TTFT of 88%.

In `cold` scenarios the gateway starts before its engines, requests come once all are up, and the streams of the engines
carry several tokens per event, as those of many proxies do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from random import Random

from benchmarks.frontier_traffic import TRAFFIC, shaped
from gateway.config.loading import load
from lab.replay import sim_fleet
from lab.replay.sim_fleet import BASELINES, OURS, POOLABLE, POOLED, REFERENCES, ScheduledFault, scenario_from
from lab.traffic.sessions import read_sessions
from lab.traffic.traces import Agents, Arrival, agents, at_load, read_trace, spread

HERE = Path(__file__).parent / "scenarios"
SECONDS = 400.0  # of virtual time per replay
WARM_UP = 200.0  # s of synthetic sessions before: otherwise all would start at their first turn
FIRST_TOKEN = 120.0  # s: baselines never shed
SESSIONS_SECONDS = 180.0  # of virtual time per replay of recorded sessions
SESSIONS_FIRST_TOKEN = 60.0  # s, as a gateway has it by default: the callers of a closed loop wait for it
RETURNS = 2  # times that a caller in the closed loop comes back after a 503, as the SDKs do
SLOW, DEAD = "main/h1:8000", "main/h2:8000"
FAULTS = (
    ScheduledFault(120.0, SLOW, "slow", 5.0),
    ScheduledFault(160.0, SLOW, "slow", 1.0),
    ScheduledFault(240.0, DEAD, "kill"),
    ScheduledFault(270.0, DEAD, "restart"),
)
TROUBLE = (120.0, 270.0)  # s, from the first to the last
RATES = (0.4, 0.5, 0.6, 0.7)  # new sessions per second
EVERY = (0.2, 0.5, 0.8, 1.1, 1.4, 1.8, 2.2)  # loads, from nearly idle to far too much
LIGHT = (0.2, 0.3, 0.45, 0.6, 0.8)  # loads at which most engines have nothing to prefill most of the time
PLAIN = ("lpwl", "cache_aware", "lmetric")  # the baselines that light loads suit best
AGENTS = 40  # sessions at a time, at a load of 1
AGENTS_SECONDS = 480.0  # of virtual time: a cold start, and minutes after it
LONGEST_GAP = 30.0  # s between two turns of these sessions
COLD_TOKENS_PER_EVENT = 4
FIRST_UP, NEXT_UP = 1.0, 0.25  # s after the gateway at which the first engine is up, and until each further one
# Median of the tokens, deviation of their logarithm, and most. The preset `task` counts on 120.
ANSWERS = (("task", 120, 0.6, 512), ("report", 2500, 0.5, 8192))
COLD_START = 4.0  # s after the gateway at which requests begin to come: every engine has answered a probe


@dataclass(frozen=True, slots=True)
class Scenario:
    """`base`: the trace's pace times `base` is a load of 1. `fleet`: file of the fleet, if another than `name`.
    `traffic`: name of the scenario with the same requests, if another."""

    name: str
    title: str
    base: float
    scorers: tuple[str, ...] = (OURS, *BASELINES, *REFERENCES)
    loads: tuple[float, ...] = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)
    fleet: str = ""
    traffic: str = ""
    cold: bool = False


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("a", "long conversations on eight equal engines", 2.5),
        Scenario("b", "the same on an uneven fleet; one engine is slow for 40 s, another dead for 30 s", 1.34),
        Scenario(
            "c",
            "chat, code completion, agents and batch over small and large engines and an API",
            0.405,
            (OURS, *BASELINES, *(POOLED + name for name in POOLABLE), *REFERENCES),
        ),
        Scenario("d", "agent sessions of many turns, nearly all of whose prompts were seen before", 0.83),
        Scenario("e", "recorded coding-agent sessions, turns at their recorded times", 1.0, loads=RATES, fleet="d"),
        Scenario("e-closed", "the same, each turn a think time after the last answer", 1.0, loads=RATES, fleet="d"),
        Scenario(
            "a-cold",
            "(a) at light load, from a cold start",
            2.5,
            (OURS, *PLAIN),
            (0.4, 0.6),
            fleet="a",
            traffic="a",
            cold=True,
        ),
        Scenario(
            "e-cold",
            "(e) at light load, from a cold start",
            1.0,
            (OURS, *PLAIN),
            LIGHT,
            fleet="d",
            traffic="e",
            cold=True,
        ),
        Scenario(
            "agents",
            "recorded coding-agent sessions, a level number at a time, from a cold start",
            AGENTS,
            (OURS, *PLAIN),
            LIGHT,
            cold=True,
        ),
        Scenario("reasoning", "short questions with long answers, by the lengths of DeepSeek-R1", 21.5, loads=EVERY),
        Scenario("documents", "short questions on long documents", 8.9, loads=EVERY),
        Scenario("adapters", "chats with 60 LoRA adapters on eight engines with eight places each", 2.65, loads=EVERY),
        Scenario(
            "upgrade", "a rolling upgrade of 64 engines of three kinds, without draining", 15.0, loads=(0.5, 1, 1.5)
        ),
        Scenario("region", "two regions, of which the nearer one is lost for 40 s", 2.06, loads=EVERY),
        Scenario("crowd", "chats, five times as many within 20 s", 1.22, loads=EVERY),
        Scenario("promises", "whole answers in 5, 30 and 60 s: tasks, agents and reports over three kinds", 1.0),
    )
}


def setting(name: str) -> sim_fleet.Scenario:
    chosen = SCENARIOS[name]
    found = replace(scenario_from(load([HERE / f"{chosen.fleet or name}.yaml"], {})), first_token=FIRST_TOKEN)
    traffic = chosen.traffic or name
    if traffic in ("e", "e-closed", "agents"):
        found = replace(
            found,
            first_token=SESSIONS_FIRST_TOKEN,
            seconds=AGENTS_SECONDS if traffic == "agents" else SESSIONS_SECONDS,
            returns=RETURNS if traffic == "e-closed" else 0,
        )
    found = shaped(traffic, found)
    if chosen.cold:
        found = replace(found, starts=late(found), tokens_per_event=COLD_TOKENS_PER_EVENT)
    return replace(found, faults=FAULTS) if name == "b" else found


def late(found: sim_fleet.Scenario) -> dict[str, float]:
    """Time at which each engine is up, by endpoint."""
    return {endpoint: FIRST_UP + NEXT_UP * number for number, endpoint in enumerate(found.profiles)}


def arrivals(name: str, load: float, traces: Path, seed: int) -> list[Arrival]:
    """The first SECONDS of the scenario's requests at `load` times the base."""
    chosen = SCENARIOS[name]
    offered = _offered(chosen.traffic or name, chosen.base * load, traces, seed)
    return [replace(arrival, at=arrival.at + COLD_START) for arrival in offered] if chosen.cold else offered


def _offered(name: str, factor: float, traces: Path, seed: int) -> list[Arrival]:
    if name in TRAFFIC:
        return TRAFFIC[name](factor, traces, seed)
    if name == "agents":
        recorded = read_sessions(traces / "agent_sessions.jsonl")
        turns = recorded.at_a_time(round(factor), AGENTS_SECONDS, seed, LONGEST_GAP)
        return [replace(arrival, route="agent") for arrival in turns]
    if name in ("e", "e-closed"):
        recorded = read_sessions(traces / "agent_sessions.jsonl")
        started = recorded.started(factor, SESSIONS_SECONDS, seed, closed=name == "e-closed")
        return [replace(arrival, route="agent") for arrival in started]
    if name == "d":
        return _sessions(factor, seed)
    if name == "promises":
        return whole_answers(traces, factor, seed)
    mooncake = spread(read_trace(traces / "mooncake_conversation.jsonl"), seed)
    if name != "c":
        return _cut([replace(arrival, route="agent") for arrival in mooncake], factor)
    mixed = [replace(arrival, route="chat") for arrival in read_trace(traces / "azure2023_conv.csv")]
    mixed += [replace(arrival, route="code") for arrival in read_trace(traces / "azure2023_code.csv")]
    mixed += [replace(arrival, route="agent" if i % 4 else "batch") for i, arrival in enumerate(mooncake)]
    return _cut(sorted(mixed, key=lambda arrival: arrival.at), factor)


def _sessions(factor: float, seed: int) -> list[Arrival]:
    """More sessions, at the same pace each."""
    usual = Agents()
    shape = replace(usual, seconds=SECONDS + WARM_UP, sessions=usual.sessions * factor)
    made = (replace(arrival, at=arrival.at - WARM_UP, route="agent") for arrival in agents(shape, seed))
    return [arrival for arrival in made if arrival.at >= 0]


def whole_answers(traces: Path, factor: float, seed: int) -> list[Arrival]:
    """Tasks, steps of agents, and reports: prompts like tasks, and answers of a log-normal length."""
    random = Random(seed)
    conversations = read_trace(traces / "azure2023_conv.csv")
    made = [
        replace(
            arrival, route=route, output_tokens=min(max(round(random.lognormvariate(log(median), spread_of)), 1), most)
        )
        for i, arrival in enumerate(conversations)
        for route, median, spread_of, most in (ANSWERS[i % 4 == 0],)
    ]
    made += [
        replace(arrival, route="agent") for arrival in spread(read_trace(traces / "mooncake_conversation.jsonl"), seed)
    ]
    return _cut(sorted(made, key=lambda arrival: arrival.at), factor)


def _cut(trace: list[Arrival], factor: float) -> list[Arrival]:
    return [arrival for arrival in at_load(trace, factor) if arrival.at < SECONDS]
