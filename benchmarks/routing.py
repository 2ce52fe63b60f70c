"""Ours beside the yardsticks, on four scenarios, over a range of loads.

    python -m benchmarks.routing a --traces DIR            # a sweep of 0.5 to 1.5 of the base load
    python -m benchmarks.routing a --traces DIR --find     # look for the base load first

The base load is that at which round robin reaches 50 % attainment; BASE holds what `--find` found.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from gateway.config.loading import load
from gateway.replay.player import play
from gateway.replay.setting import Setting, setting_of
from gateway.replay.synthetic import agents
from gateway.replay.traces import Arrival, at_load, read_trace, spread
from gateway.replay.world import Fault

HERE = Path(__file__).parent
YARDSTICKS = ("round_robin", "least_request", "prefix_hash", "lmetric", "token_load", "argmin_ttft")
BASE = {"a": 2.5, "b": 1.34, "c": 0.405, "d": 0.83}  # times the trace's own pace
LOADS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)
SECONDS = 400.0  # of virtual time that one replay plays


def setting(name: str) -> Setting:
    found = replace(setting_of(load([HERE / "scenarios" / f"{name}.yaml"], {})), first_token=120.0)
    if name == "b":
        slow, dead = "main/h1:8000", "main/h2:8000"
        faults = (Fault(120, slow, "slow", 5.0), Fault(160, slow, "slow", 1.0), Fault(240, dead, "kill"), Fault(270, dead, "restart"))
        found = replace(found, faults=faults)
    return found


def arrivals(name: str, factor: float, traces: Path, seed: int) -> list[Arrival]:
    """The scenario's requests at `factor` times its own pace, for SECONDS."""
    if name == "d":
        made = agents(replace(AGENTS, seconds=SECONDS * 1.5, sessions=AGENTS.sessions * factor), seed)
        return [replace(a, at=a.at - SECONDS / 2, route="agent") for a in made if a.at >= SECONDS / 2]
    mooncake = spread(read_trace(traces / "mooncake_conversation.jsonl"), seed)
    if name in ("a", "b"):
        return cut([replace(a, route="agent") for a in mooncake], factor)
    chat = spread(read_trace(traces / "azure2023_conv.csv"), seed)
    code = spread(read_trace(traces / "azure2023_code.csv"), seed)
    mixed = [replace(a, route="chat") for a in chat] + [replace(a, route="code") for a in code]
    mixed += [replace(a, route="agent" if i % 4 else "batch") for i, a in enumerate(mooncake)]
    return cut(sorted(mixed, key=lambda a: a.at), factor)


def cut(trace: Sequence[Arrival], factor: float) -> list[Arrival]:
    return [a for a in at_load(trace, factor) if a.at < SECONDS]


from gateway.replay.synthetic import Agents  # noqa: E402

AGENTS = Agents()


def one(task: tuple[str, str, float, str, int]) -> dict[str, object]:
    name, scorer, factor, traces, seed = task
    found = setting(name)
    tally = play(found.with_scorer(scorer), arrivals(name, factor, Path(traces), seed), seed)
    rows = {row.name: asdict(row) for row in tally.rows()}
    if name == "b":
        rows["during"] = asdict(tally.between(120, 270))
    return {"scenario": name, "scorer": scorer, "load": factor, "seed": seed, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario")
    parser.add_argument("--traces", required=True)
    parser.add_argument("--scorers", default=",".join(("ours", *YARDSTICKS)))
    parser.add_argument("--loads", default=",".join(map(str, LOADS)))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--find", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    loads = [float(x) for x in args.loads.split(",")]
    if args.find:
        low, high = 0.1, 16.0
        while high / low > 1.03:
            middle = (low * high) ** 0.5
            share = one((args.scenario, "round_robin", middle, args.traces, 0))["rows"]["all"]["attainment"]  # type: ignore[index]
            print(f"{middle:.3f} {share:.3f}", flush=True)
            low, high = (middle, high) if share > 0.5 else (low, middle)
        return
    tasks = [
        (args.scenario, scorer, BASE[args.scenario] * x, args.traces, seed)
        for x in loads
        for scorer in args.scorers.split(",")
        for seed in range(args.seeds)
    ]
    with ProcessPoolExecutor(2) as pool:
        for result in pool.map(one, tasks):
            if args.out:
                with open(args.out, "a") as out:
                    out.write(json.dumps(result) + "\n")
            row = result["rows"]["all"]  # type: ignore[index]
            tiers = " ".join(f"{k}:{r['good']:.2f}/{r['preferred']:.2f}" for k, r in result["rows"].items() if k not in ("all",))  # type: ignore[attr-defined]
            print(
                f"{args.scenario} {result['load'] / BASE[args.scenario]:.2f} {result['scorer']:14s} att {row['attainment']:.3f} good {row['good']:.3f} "
                f"p50/90/99 {row['ttft'][0]:.2f} {row['ttft'][1]:.2f} {row['ttft'][2]:.2f} tpot {row['tpot'][1]:.3f} hit {row['hit']:.2f} "
                f"cov {row['coverage']:.2f} err {row['error']:.3f} pref {row['preferred']:.2f} ${row['cost']:.2f} shed {row['sheds']} lost {row['lost']} broken {row['broken']} extra {row['extra']} {tiers}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
