"""Recorded sessions in the closed loop beside what can be reached: turns and whole sessions, and refused callers who
come back.

    python -m benchmarks.closed_loop --traces DIR [--load .7] [--seeds 12]            # sessions
    python -m benchmarks.closed_loop --traces DIR --returns [--every 2] [SCENARIO...] # the best Retry-After, in forks
    python -m benchmarks.closed_loop --page                                           # the page, from stored results

Results are appended to RESULTS, a line of JSON per replay. `benchmarks.session_bound` says what no policy exceeds, and
`lab.replay.best_return` what a gateway that knows the future could promise. With `--returns`, refused callers come back
as in (e-closed), whatever the scenario; `--every`: only of each so-many-th refused caller all times are tried.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.replays import Replay, command, names, parsed, rules, stored, sweep
from benchmarks.routing import replay_one
from benchmarks.scenarios import RETURNS, SCENARIOS, arrivals, setting
from benchmarks.session_bound import bound
from lab.replay.best_return import play_returns
from lab.replay.sim_fleet import OURS, REFERENCE, REFERENCE_LRU

RESULTS, PAGE = Path(".cache/closed_loop.jsonl"), Path(__file__).parent / "CLOSED_LOOP.md"
SEEDS, LOAD = 12, 0.7
PLAYED = (OURS, "lpwl", REFERENCE, REFERENCE_LRU)
BOUND = "bound"  # in place of a scorer
TTFT = ("p50", "p90")  # ms, of a row
SHOWN = {OURS: "ours", REFERENCE: "reference, perfect caches", REFERENCE_LRU: "reference, real caches"}
Row = Mapping[str, Any]
HEADING = """\
# Closed loop

What `python -m benchmarks.closed_loop` found: recorded coding-agent sessions, each turn a think time after the last
answer, (e-closed) of [ROUTING.md](ROUTING.md), beside what can be reached. *rules*: the newest decision record when
the row was played, kept by git.
"""
SESSIONS = """\
## Turns and sessions

Shares of good turns (TTFT and TPOT within budget), p50 and p90 of the TTFT of the answered turns in ms, and shares of
sessions with every turn good; means over the seeds, with the standard error. *No policy exceeds*: a turn is impossible
if an idle engine with every earlier prompt cached exceeds the TTFT budget; a session that reaches one, answered as
slowly as budgets allow, is not good as a whole. *Idle fleet*: each answer as fast as by an idle engine. The references
are no bound here: they plan with the recorded times of coming turns, which a closed loop shifts, and hold late
requests, which ours refuses.
The command is `python -m benchmarks.closed_loop --traces DIR --load LOAD --seeds N`.
"""
COMING_BACK = """\
## Refused callers who come back

Of the callers who were refused: answered at the return that `retry-after` named, and at the best of five times that
could have been named, the future known: the replay is forked at the refusal, one caller is sent away for 5, 15, 30 or
60 s in place of the named time, and all others fare as they do. SDKs wait for 60 s at most. That all of them could have
their best times together is not said. *tried*: each second or third refused caller, in order. Beyond these shares it
takes other rules of who goes to which engine: what they cost others is in
[MEASURED.md](MEASURED.md#queue).
The command is `python -m benchmarks.closed_loop --traces DIR --returns --load LOAD --every N --seeds N SCENARIO`.
"""


def played(task: Replay) -> dict[str, Any]:
    """`scorer` BOUND: no replay, but the bound."""
    name, load, scorer, seed, traces = task
    key = {"kind": "sessions", "scenario": name, "load": load, "scorer": scorer, "seed": seed, "rules": rules()}
    if scorer == BOUND:
        return key | asdict(bound(arrivals(name, load, traces, seed), setting(name)))
    found = replay_one(task)
    row = found["rows"]["all"]
    ttft = {name: seconds * 1e3 for name, seconds in zip(TTFT, row["ttft"], strict=False)}
    return key | {"turns": row["good"], "whole": found["sessions"]["good"], "offered": row["offered"]} | ttft


def returned(task: tuple[str, float, int, int, Path]) -> dict[str, Any]:
    name, load, seed, every, traces = task
    scenario = replace(setting(name), returns=RETURNS)
    results, found = play_returns(scenario, arrivals(name, load, traces, seed), seed, every)
    return {
        "kind": "returns",
        "scenario": name,
        "load": load,
        "scorer": OURS,
        "seed": seed,
        "rules": rules(),
        "refused": sum(bool(result.refusals) for result in results.requests),
        "tried": len(found),
        "own": sum(each.own for each in found),
        "best": sum(each.best is not None for each in found),
    }


# ---------------------------------------------------------------- page


def page(found: Sequence[Row]) -> str:
    sessions = [row for row in found if row["kind"] == "sessions"]
    returns = [row for row in found if row["kind"] == "returns"]
    parts = [HEADING, SESSIONS, "\n".join(session_table(sessions)), COMING_BACK, "\n".join(return_table(returns))]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def session_table(found: Iterable[Row]) -> Iterator[str]:
    yield "| scenario, load | | good turns | p50 | p90 | whole sessions | seeds | rules |"
    yield "|---" * 8 + "|"
    for (name, load, scorer), rows in _groups(found, "scenario", "load", "scorer").items():
        where, end = f"| ({name}) {load:g} | ", f" | {len(rows)} | {min(row['rules'] for row in rows)} |"
        turns, whole = _mean(rows, "turns"), _mean(rows, "whole")
        if scorer == BOUND:
            yield f"{where}no policy exceeds | | | | {whole}{end}"
            yield f"{where}idle fleet | {turns} | | | {_mean(rows, 'whole_idle')}{end}"
        else:
            p50, p90 = (_mean(rows, name, 0) if all(name in row for row in rows) else "-" for name in TTFT)
            yield f"{where}{SHOWN.get(scorer, f'`{scorer}`')} | {turns} | {p50} | {p90} | {whole}{end}"


def return_table(found: Iterable[Row]) -> Iterator[str]:
    yield "| scenario, load | refused | tried | answered at the return named | at the best | seeds | rules |"
    yield "|---" * 7 + "|"
    for (name, load), rows in _groups(found, "scenario", "load").items():
        refused, tried, own, best = (sum(row[part] for row in rows) for part in ("refused", "tried", "own", "best"))
        shares = f"{own / tried:.2f} | {best / tried:.2f}" if tried else "- | -"
        latest = min(row["rules"] for row in rows)
        yield f"| ({name}) {load:g} | {refused} | {tried} | {shares} | {len(rows)} | {latest} |"


def _groups(found: Iterable[Row], *key: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        groups.setdefault(tuple(row[part] for part in key), []).append(row)
    return groups


def _mean(rows: Sequence[Row], value: str, digits: int = 3) -> str:
    """With the standard error, where there are several."""
    values = [row[value] for row in rows]
    error = f" ±{stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{error}"


# ---------------------------------------------------------------- command


def tasks(args: argparse.Namespace) -> Iterator[Replay]:
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    return ((name, args.load, scorer, seed, args.traces) for name, scorer, seed in _each(args, seeds))


def _each(args: argparse.Namespace, seeds: range) -> Iterator[tuple[str, str, int]]:
    for name in args.scenarios or ["e-closed"]:
        yield from ((name, scorer, seed) for scorer in args.scorers for seed in seeds)


def main() -> None:
    parser = command(__doc__, SEEDS, RESULTS, PAGE)
    parser.add_argument("--load", type=float, default=LOAD)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--scorers", type=names, default=[*PLAYED, BOUND])
    parser.add_argument("--returns", action="store_true", help="refused callers, in forks of the replay")
    parser.add_argument("--every", type=int, default=2)
    args = parsed(parser)
    if args.page:
        PAGE.write_text(page(stored(args.results, "kind", "scenario", "load", "scorer", "seed")))
        return
    if args.returns:
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        todo = [
            (name, args.load, seed, args.every, args.traces) for name in args.scenarios or SCENARIOS for seed in seeds
        ]
        rows = sweep(returned, todo, args.jobs, args.results)
    else:
        rows = sweep(played, tasks(args), args.jobs, args.results)
    for row in rows:
        print("\t".join(map(str, row.values())), flush=True)


if __name__ == "__main__":
    main()
