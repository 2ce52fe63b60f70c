"""What a play of a scenario prints."""

from __future__ import annotations

import json

from benchmarks.played import as_json, report
from tests.lab.played.test_play import ENGINES, play
from tests.support.replay_builders import arrivals


def test_a_run_is_a_table_and_a_line_of_json() -> None:
    """With keys of several names."""
    run = {"scenario": "d", "load": 1.0, "seed": 0, "cpu_s": 2.0, "played": play(ENGINES, arrivals(3, rate=10.0))}
    lines = [*report(run)]
    assert lines[0] == "d 1 seed 0: 2 s of CPU"
    assert lines[2].split()[:2] == ["agent", "3"]
    said = json.loads(as_json(run))
    assert (said["scenario"], [row["row"]["name"] for row in said["rows"]]) == ("d", ["agent", "all"])
