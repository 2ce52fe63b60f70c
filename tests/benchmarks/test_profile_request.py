"""Attribution of CPU samples of a gateway."""

from __future__ import annotations

import asyncio
import inspect
import json
from dis import opname
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import ROOT
from benchmarks.profile_request import LOOP, THREADS, Samples
from benchmarks.sampled import Sampler, entry

pytestmark = pytest.mark.virtual_time

RELAY, RUN = (
    (f"{ROOT}/gateway/upstream/answer.py", "Relay.begin"),
    (f"{ROOT}/gateway/upstream/upstream_request.py", "Run.on_body"),
)
LIBRARY, SERVE = ("/usr/lib/python3/json/encoder.py", "encode"), (f"{ROOT}/gateway/serve.py", "serve")


def samples(*stacks: tuple[list[tuple[str, str]], float]) -> Samples:
    return Samples.of({"stacks": [list(each) for each in stacks], "threads": 0.5, "garbage": 0.1})


def test_what_is_used_in_a_library_is_its_callers() -> None:
    """The nearest known caller."""
    found = samples(([LIBRARY, RELAY, RUN, SERVE], 1.0), ([RUN, SERVE], 2.0))
    assert found.rows == {"relay": 1.0, "upstream": 2.0, THREADS: 0.5}
    assert found.own["gateway/upstream/answer.py:Relay.begin"] == 1.0
    assert found.cumulative["gateway/upstream/upstream_request.py:Run.on_body"] == 3.0
    assert (found.total, found.garbage) == (3.5, 0.1)


def test_where_nothing_of_ours_is_at_work_it_is_the_loop() -> None:
    """Reading from sockets, and start-up and waiting."""
    assert samples(([LIBRARY, SERVE], 1.0)).rows[LOOP] == 1.0


def test_a_function_that_calls_itself_is_counted_once() -> None:
    """Cumulative time does not exceed the total."""
    assert samples(([RELAY, RELAY, SERVE], 1.0)).cumulative["gateway/upstream/answer.py:Relay.begin"] == 1.0


async def _waits() -> None:
    await asyncio.sleep(0)


def _counts(n: int) -> list[int]:
    return [i for i in range(n)]  # noqa: C416 - for its own frame


@pytest.mark.parametrize("made", [_waits, _counts, test_a_function_that_calls_itself_is_counted_once])
def test_an_entry_is_before_the_first_thing_that_a_function_does(made: Any) -> None:
    """A library's time belongs to its caller."""
    code = made.__code__
    assert opname[code.co_code[entry(code)]] == "RESUME"


def test_a_sampler_writes_what_it_found_and_begins_anew(tmp_path: Path) -> None:
    """Each load has its own samples."""
    sampler = Sampler(tmp_path / "samples")
    for stacks in (1, 0):
        if stacks:
            sampler.sample(0, inspect.currentframe())
        sampler.write(0, None)
        assert len(json.loads((tmp_path / "samples").read_text())["stacks"]) == stacks
