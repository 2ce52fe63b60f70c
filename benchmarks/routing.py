"""Our routing beside the baselines and the clairvoyant reference, over a range of loads.

    python -m benchmarks.routing --traces DIR a --seeds 3      # one scenario, its results and the page
    python -m benchmarks.routing --traces DIR --find a         # look for the base load
    python -m benchmarks.routing --page                        # the page again, from the stored results
    python -m benchmarks.routing --traces DIR c --late-counts --results FILE    # queues as over HTTP

Results are appended to RESULTS, a line of JSON per replay, so scenarios can run one at a time; the page shows all.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.replays import Replay, add_replays, command, parsed, replays, rules, stored, sweep
from benchmarks.routing_page import page, table
from benchmarks.scenarios import SCENARIOS, TROUBLE, arrivals, setting
from lab.replay.player import play
from lab.replay.queue_results import queue_row
from lab.replay.session_results import session_row

RESULTS, PAGE = Path(".cache/routing.jsonl"), Path(__file__).parent / "ROUTING.md"
LATE_COUNTS = "LATE_COUNTS"  # variable of the environment, for the processes that replay
NEAR = 1.03  # precision of the base load


def replay_one(task: Replay) -> dict[str, Any]:
    name, load, scorer, seed, traces = task
    found = replace(setting(name), late_counts=LATE_COUNTS in os.environ)
    played, offered = found.with_scorer(scorer), arrivals(name, load, traces, seed)
    tally = play(played, offered, seed)
    rows = {row.name: asdict(row) for row in tally.rows()}
    if name == "b":
        rows["trouble"] = asdict(tally.between(*TROUBLE))
    sessions = session_row(tally, offered, played)
    return {
        "scenario": name,
        "load": load,
        "scorer": scorer,
        "seed": seed,
        "rules": rules(),
        "rows": rows,
        "sessions": sessions and asdict(sessions),
        "queue": asdict(queue_row(tally, offered, played)),
    }


def read(results: Path) -> list[dict[str, Any]]:
    """Of repeated replays, the last."""
    return stored(results, "scenario", "load", "scorer", "seed")


def find(name: str, traces: Path) -> float:
    """The factor of the base at which round robin meets the TTFT of half of the requests."""
    low, middle, high = 0.25, 1.0, 4.0
    while high / low > NEAR:
        middle = (low * high) ** 0.5
        met = replay_one((name, middle, "round_robin", 0, traces))["rows"]["all"]["attainment"]
        low, high = (middle, high) if met > 0.5 else (low, middle)
    return middle


def line(result: dict[str, Any]) -> str:
    row = result["rows"]["all"]
    p50, p90, p99 = row["ttft"]
    parts = " ".join(f"{name}:{part['good']:.3f}" for name, part in result["rows"].items() if name != "all")
    return (
        f"{result['scenario']} {result['load']:4.2f} {result['scorer']:20} seed {result['seed']} "
        f"good {row['good']:.3f} met {row['attainment']:.3f} p50/90/99 {p50:.2f} {p90:.2f} {p99:.2f} "
        f"tpot {row['tpot'][1]:.3f} hit {row['hit']:.2f} cov {row['coverage']:.2f} err {row['error']:.3f} "
        f"pref {row['preferred']:.2f} ${row['cost']:.2f} shed {row['sheds']} lost {row['lost']}+{row['broken']} "
        f"extra {row['extra']} API {row['external']:.3f} refused {row['refused']} after {row['refused_after']:.1f} s, "
        f"{row['returned']} came back, {row['returned_good']:.2f} in time {parts}"
        f"{_sessions(result.get('sessions'))}"
    )


def _sessions(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return (
        f" sessions {row['sessions']} whole good {row['good']:.3f} answered {row['answered']:.3f} "
        f"time/idle p50/90 {row['slowdown'][0]:.2f} {row['slowdown'][1]:.2f}"
    )


def main() -> None:
    parser = command(__doc__, 1, RESULTS, PAGE)
    add_replays(parser)
    parser.add_argument("--find", action="store_true", help="look for the base loads")
    parser.add_argument("--late-counts", action="store_true", help="of tokens of answers in progress")
    args = parsed(parser)
    if args.late_counts:
        os.environ[LATE_COUNTS] = "1"
    if args.find:
        for name in args.scenarios or SCENARIOS:
            print(f"{name}: base {SCENARIOS[name].base * find(name, args.traces):.3f}")
        return
    if not args.page:
        for result in sweep(replay_one, replays(args), args.jobs, args.results):
            print(line(result), flush=True)
    found = read(args.results)
    for name in sorted({result["scenario"] for result in found} & set(args.scenarios or SCENARIOS)):
        print("\n".join(["", *table(name, found)]))
    if args.page:
        PAGE.write_text(page(found, PAGE.read_text()))


if __name__ == "__main__":
    main()
