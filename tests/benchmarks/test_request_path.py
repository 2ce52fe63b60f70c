"""The way of a small streamed request through the product: how many calls, in how many files."""

from __future__ import annotations

import pytest

from benchmarks import request_path
from benchmarks.request_path import Call, last_read, measured, report

CALLS, FILES, LAST_READ = 528, 83, 75  # at most; a lower figure that is reached becomes the bound


def test_the_way_of_a_small_streamed_request_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests in the steady state, with all that the product does for one after its end: of a few, the one with
    fewest timers meanwhile. A reader of the code walks the same way."""
    monkeypatch.setattr(request_path, "RECORDED", 5)
    calls = min(measured(), key=len)
    assert len(calls) <= CALLS
    assert len({path for path, _, _ in calls}) <= FILES
    assert last_read(calls) <= LAST_READ


def test_the_last_read_is_the_one_that_ends_the_answer() -> None:
    """From the callback of the loop on, up to the next one."""
    calls: list[Call] = [
        *[("a.py", 0, "data_received"), ("a.py", 1, "on_body")],
        *[("a.py", 0, "data_received"), ("b.py", 1, "on_end"), ("b.py", 2, "Answer.end"), ("c.py", 3, "finished")],
        *[("d.py", 0, "serve"), ("d.py", 1, "emit")],
    ]
    assert last_read(calls) == 4
    assert next(iter(report([calls], everything=False))).startswith("4 files, 8 calls, 3 moves; 4 calls")
