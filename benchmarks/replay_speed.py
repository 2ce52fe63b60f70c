"""Speed of a replay relative to real time: agent sessions on the eight engines of scenario d.

Seconds of CPU on one core, independent of other processes. The claim: at least 100.
"""

from __future__ import annotations

from dataclasses import replace
from time import process_time

from benchmarks.scenarios import setting
from lab.replay.player import play
from lab.replay.sim_fleet import OURS, REFERENCE
from lab.traffic.traces import Agents, agents

CLAIM = 100.0
SHAPE = replace(Agents(), seconds=300.0)


def main() -> None:
    arrivals = [replace(arrival, route="agent") for arrival in agents(SHAPE)]
    for scorer in (OURS, "lmetric", REFERENCE):
        began = process_time()
        results = play(setting("d").with_scorer(scorer), arrivals)
        took = process_time() - began
        played = max(result.ended_at or 0.0 for result in results.requests)
        print(f"{scorer:10} {played:.0f} s in {took:.2f} s: {played / took:.0f} times as fast (claim: {CLAIM:.0f})")


if __name__ == "__main__":
    main()
