"""Made-up agent sessions, for what public traces do not show: many turns over one growing prompt.

A session belongs to one of a few applications, each with its own system prompt and tools, which its
sessions share. Every turn sends all that came before, the answer and a tool's output added, as soon as
the tool is done. So nearly all of a prompt has been seen before, by the engine that served the turn
before: ideal hit rate above .9, and a router that scatters a session pays for the whole of it again.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random

from gateway.replay.traces import BLOCK, Arrival


@dataclass(frozen=True, slots=True)
class Agents:
    """`sessions` per second start for `seconds`; lengths are tokens, log-normal around their medians."""

    seconds: float = 900.0
    sessions: float = 0.6
    applications: int = 6
    system: int = 6_000
    task: int = 1_500
    turns: float = 16.0  # mean, geometric
    tool: int = 700
    answer: int = 220
    pause: float = 6.0  # s between two requests of a session, mean: answer, tool, thought
    longest: int = 38_000  # a session ends before its prompt grows beyond


def agents(shape: Agents = Agents(), seed: int = 0) -> list[Arrival]:
    """Arrivals in order of time."""
    random, arrivals, at, number = Random(seed), list[Arrival](), 0.0, 0
    systems = [int(shape.system * random.lognormvariate(0.0, 0.4)) for _ in range(shape.applications)]
    while (at := at + random.expovariate(shape.sessions)) < shape.seconds:
        number += 1
        application = min(int(random.paretovariate(1.0)) - 1, shape.applications - 1)  # a few are most of the traffic
        arrivals += _session(shape, random, at, number, application, systems[application])
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _session(shape: Agents, random: Random, at: float, number: int, application: int, system: int) -> list[Arrival]:
    shared = [(application + 1) << 32 | block for block in range(system // BLOCK)]
    prompt, turns = system + int(shape.task * random.lognormvariate(0.0, 0.6)), list[Arrival]()
    while prompt < shape.longest and at < shape.seconds:
        own = range(len(shared), prompt // BLOCK)
        hashes = array("Q", [*shared, *((number << 40) | block for block in own)])
        answer = max(int(shape.answer * random.lognormvariate(0.0, 0.7)), 2)
        turns.append(Arrival(at, prompt, answer, hashes))
        prompt += answer + int(shape.tool * random.lognormvariate(0.0, 0.9))
        at += 1.0 + answer * 0.02 + random.expovariate(1 / shape.pause)
        if random.random() < 1 / shape.turns:
            break
    return turns
