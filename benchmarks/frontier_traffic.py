"""Traffic and faults of the scenarios beyond plain traces: published statistics, or a public trace that is bent.

Rules:
- A function of TRAFFIC returns the arrivals of one scenario: `factor` is the load, in requests per second where lengths
  are drawn, in multiples of the recorded pace where a trace is played. Equal seeds give equal arrivals.
- Every replay takes a few seconds of CPU time: durations are as short as the effect that is looked for allows.
- The source of each is named beside it and in the file of the fleet, with what the engine model cannot play.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random

from backends.server_profiles import EngineProfile, Profile
from lab.replay.sim_fleet import Scenario, ScheduledFault
from lab.traffic.traces import BLOCK, Arrival, at_load, read_trace, spread

Traffic = Callable[[float, Path, int], list[Arrival]]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Quantiles of a distribution at SHARES, in tokens; linear in their logarithms between them."""

    quantiles: Sequence[float]

    def drawn(self, random: Random) -> int:
        share = random.random()
        i = min(bisect_right(SHARES, share), len(SHARES) - 1)
        part = (share - SHARES[i - 1]) / (SHARES[i] - SHARES[i - 1])
        low, high = self.quantiles[i - 1], self.quantiles[i]
        return round(low * (high / low) ** part)


# --------------------------------------------------------------------------- reasoning

REASONING_SECONDS = 150.0
LONGEST_ANSWER = 8192  # tokens, 3% are longer: a replay ends 300 s after the last arrival, as max_tokens would
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
# ServeGen (alibaba/ServeGen f891d11, arXiv:2505.09999), `data/reason/deepseek-r1`: all clients, by their rates.
R1_PROMPT = Lengths((7, 13, 18, 29, 57, 113, 208, 266, 406, 748, 2092, 6714, 23423, 31878))
R1_OUTPUT = Lengths((117, 225, 287, 387, 470, 582, 792, 1104, 1367, 1680, 3432, 5701, 12607, 18927))  # reasoning too


def reasoning(factor: float, traces: Path, seed: int) -> list[Arrival]:
    """Poisson arrivals of questions that are short against their answers. No two prompts share a prefix."""
    random, at, found = Random(seed), 0.0, list[Arrival]()
    while (at := at + random.expovariate(factor)) < REASONING_SECONDS:
        output = min(R1_OUTPUT.drawn(random), LONGEST_ANSWER)
        found.append(Arrival(at, R1_PROMPT.drawn(random), output, route="chat", max_tokens=LONGEST_ANSWER))
    return found


# --------------------------------------------------------------------------- long documents

DOCUMENT_SECONDS = 180.0
READ_BEFORE = 120.0  # s of documents opened earlier: otherwise all questions would be the first of their documents
# Mooncake (arXiv:2407.00079), table of the datasets: L-Eval, 19,019 prompt tokens and 72 of answer on average, over 80%
# cached. Lengths of L-Eval (arXiv:2307.11088): 3k to 200k tokens.
DOCUMENT_TOKENS, DOCUMENT_SIGMA, SHORTEST_DOCUMENT, LONGEST_DOCUMENT = 19_000, 0.6, 3_000, 120_000
ANSWER_TOKENS, ANSWER_SIGMA = 72, 0.7
QUESTIONS = 6.0  # per document, mean: five of six find it cached, with caches of any size
QUESTION_TOKENS = (16, 128)
BETWEEN_QUESTIONS = 15.0  # s, mean


def documents(factor: float, traces: Path, seed: int) -> list[Arrival]:
    """Questions on documents, opened as a Poisson process: a document is the prefix that all of its questions share."""
    random, opened, number, found = Random(seed), -READ_BEFORE, 0, list[Arrival]()
    while (opened := opened + random.expovariate(factor / QUESTIONS)) < DOCUMENT_SECONDS:
        number += 1
        found += _questions(random, opened, number)
    return sorted((each for each in found if 0 <= each.at < DOCUMENT_SECONDS), key=lambda arrival: arrival.at)


def _questions(random: Random, at: float, number: int) -> Iterable[Arrival]:
    length = min(max(_lognormal(random, DOCUMENT_TOKENS, DOCUMENT_SIGMA), SHORTEST_DOCUMENT), LONGEST_DOCUMENT)
    blocks = range(number << 40, (number << 40) + length // BLOCK)
    while True:
        answer = max(_lognormal(random, ANSWER_TOKENS, ANSWER_SIGMA), 2)
        yield Arrival(at, length + random.randint(*QUESTION_TOKENS), answer, blocks, route="chat")
        if random.random() < 1 / QUESTIONS:
            return
        at += random.expovariate(1 / BETWEEN_QUESTIONS)


def _lognormal(random: Random, mean: float, sigma: float) -> int:
    return round(mean * random.lognormvariate(-(sigma**2) / 2, sigma))


# --------------------------------------------------------------------------- many adapters

ADAPTERS = tuple(f"a{number:02}" for number in range(60))
ADAPTER_SECONDS = 60.0
POPULARITY = tuple(accumulate(1 / rank for rank in range(1, len(ADAPTERS) + 1)))  # S-LoRA (arXiv:2311.03285): power law


def adapters(factor: float, traces: Path, seed: int) -> list[Arrival]:
    """Chats of the Azure trace, each for one of 60 LoRA adapters, the n-th most popular with a share of 1 / n."""
    random = Random(seed)
    chats = _played(read_trace(traces / "azure2023_conv.csv"), factor, ADAPTER_SECONDS, random)
    names = random.choices(ADAPTERS, cum_weights=POPULARITY, k=len(chats))
    return [replace(chat, route=name) for chat, name in zip(chats, names, strict=True)]


# --------------------------------------------------------------------------- a rolling upgrade

UPGRADE_SECONDS = 90.0
WAVES, WAVE_SECONDS = 8, 10.0
LONGEST_PROMPT = 24_000  # tokens: what an engine of the least kind can hold beside an answer; 13% are longer


def upgrade(factor: float, traces: Path, seed: int) -> list[Arrival]:
    """Conversations of the Mooncake trace, without prompts that not every engine can hold."""
    mooncake = spread(read_trace(traces / "mooncake_conversation.jsonl"), seed)
    short = [replace(each, route="agent") for each in mooncake if each.prompt_tokens <= LONGEST_PROMPT]
    return _cut(short, factor, UPGRADE_SECONDS)


def rolling(endpoints: Sequence[str]) -> tuple[ScheduledFault, ...]:
    """An eighth of the engines at a time is killed, and comes back with an empty cache as the next eighth goes."""
    found = list[ScheduledFault]()
    for wave in range(WAVES):
        at = (wave + 0.5) * WAVE_SECONDS
        for endpoint in endpoints[wave::WAVES]:
            found += ScheduledFault(at, endpoint, "kill"), ScheduledFault(at + WAVE_SECONDS, endpoint, "restart")
    return tuple(found)


# --------------------------------------------------------------------------- a region lost

REGION_SECONDS = 180.0
NEAR = "near"  # the region that is lost
LOST_AT, BACK_AT = 60.0, 100.0
ROUND_TRIP = 0.083  # s between two regions: Azure's round-trip statistics, East US to West Europe


def region(factor: float, traces: Path, seed: int) -> list[Arrival]:
    """Conversations of the Mooncake trace."""
    mooncake = spread(read_trace(traces / "mooncake_conversation.jsonl"), seed)
    return _cut([replace(each, route="agent") for each in mooncake], factor, REGION_SECONDS)


def outage(endpoints: Iterable[str]) -> tuple[ScheduledFault, ...]:
    """All of these engines die at once, and come back at once with empty caches."""
    kinds = ((LOST_AT, "kill"), (BACK_AT, "restart"))
    return tuple(ScheduledFault(at, endpoint, kind) for at, kind in kinds for endpoint in endpoints)


# --------------------------------------------------------------------------- a flash crowd

CROWD_SECONDS = 150.0
SURGE = ((0.0, 1.0), (50.0, 1.0), (70.0, 5.0), (100.0, 5.0), (120.0, 1.0), (CROWD_SECONDS, 1.0))  # s, times the rate
Rise = tuple[tuple[float, float], tuple[float, float]]
RISES: Sequence[Rise] = tuple(pairwise(SURGE))


def crowd(factor: float, traces: Path, seed: int) -> list[Arrival]:
    """Chats of the Azure trace, five times as many within 20 s, for 30 s."""
    calm = _played(read_trace(traces / "azure2023_conv.csv"), factor, sum(map(_span, RISES)), Random(seed))
    return [replace(each, at=surged(each.at), route="chat") for each in calm]


def surged(calm: float) -> float:
    """Time at which the request comes that would come at `calm` seconds without the surge."""
    for rise in RISES:
        if calm < (span := _span(rise)):
            break
        calm -= span
    (at, low), (end, high) = rise
    slope = (high - low) / (end - at)
    return at + (((low * low + 2 * slope * calm) ** 0.5 - low) / slope if slope else calm / low)


def _span(rise: Rise) -> float:
    """Seconds that as many requests would take without the surge."""
    (at, low), (end, high) = rise
    return (end - at) * (low + high) / 2


# --------------------------------------------------------------------------- traces


def _played(trace: Sequence[Arrival], factor: float, seconds: float, random: Random) -> list[Arrival]:
    """`seconds` of the trace at `factor` times its pace, from a random part of its first half."""
    begin = random.random() * trace[-1].at / 2
    later = [replace(arrival, at=arrival.at - begin) for arrival in trace if arrival.at >= begin]
    return _cut(later, factor, seconds)


def _cut(trace: Iterable[Arrival], factor: float, seconds: float) -> list[Arrival]:
    return [arrival for arrival in at_load(trace, factor) if arrival.at < seconds]


TRAFFIC: Mapping[str, Traffic] = {
    "reasoning": reasoning,
    "documents": documents,
    "adapters": adapters,
    "upgrade": upgrade,
    "region": region,
    "crowd": crowd,
}


def shaped(name: str, fleet: Scenario) -> Scenario:
    """The fleet of a scenario with the faults of its traffic, and with the distance of its regions."""
    if name == "upgrade":
        return replace(fleet, faults=rolling(tuple(fleet.profiles)))
    if name == "region":
        regions = {endpoint.id: endpoint.locality for pool in fleet.pools for endpoint in pool.endpoints}
        lost = [endpoint for endpoint, name in regions.items() if name == NEAR]
        far = {endpoint: distant(profile) for endpoint, profile in fleet.profiles.items() if endpoint not in lost}
        return replace(fleet, profiles={**fleet.profiles, **far}, faults=outage(lost))
    return fleet


def distant(profile: Profile) -> Profile:
    """The same server, a round trip away: all of it before the request, for its caller times the first token."""
    assert isinstance(profile, EngineProfile)
    return replace(profile, overhead=profile.overhead + ROUND_TRIP)
