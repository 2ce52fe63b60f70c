"""The page on how far replays are from what happened."""

from __future__ import annotations

import pytest

from benchmarks.overloads import OVERLOADS, configuration
from benchmarks.replay_truth import Truth, page
from gateway.config.models import Config
from lab.replay.from_log import LoggedAttainment


def test_a_replay_within_the_aim_is_counted() -> None:
    """The mean of the seeds counts, in points; shown with its sign."""
    near = Truth("near", LoggedAttainment("chat", 200, 100), [0.51, 0.54], 1.0, "8%")
    far = Truth("far", LoggedAttainment("chat", 200, 100), [0.40, 0.50], 1.0, "8%")
    assert (near.off, far.off) == (pytest.approx(2.5), pytest.approx(-5.0))
    text = "\n".join(page([near, far]))
    assert "1 of 2 within 3 points" in text
    assert "| -5.0 |" in text


@pytest.mark.parametrize("name", OVERLOADS)
def test_no_overload_tells_the_replay_its_engines(name: str) -> None:
    """A configured profile would be replayed in place of the fit."""
    overload = OVERLOADS[name]
    urls = {pool: [f"http://127.0.0.1:{n + 1}" for n in range(len(found))] for pool, found in overload.pools.items()}
    config = Config.model_validate(configuration(overload, urls))
    assert len(config.urls()) == sum(map(len, overload.pools.values()))
    assert all(pool.profile is None for pool in config.pools.values())
    assert set(config.routes) >= {callers.route for callers in overload.callers}
