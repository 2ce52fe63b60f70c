"""`firsttoken capacity`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.cli.main import main
from gateway.observe.record_columns import RECORD
from lab.capacity.capacity_command import CapacityTask
from lab.commands import add_commands
from policies.prefix_doctor.lineage import Lineage, Link
from tests.support.builders import record
from tests.support.replay_builders import CONFIG


def run(*argv: str) -> int:
    return main(["capacity", *argv], [add_commands])


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "fleet.yaml").write_text(CONFIG)
    return str(tmp_path / "fleet.yaml")


def test_the_smallest_fleet_its_reason_and_the_load_of_the_present_one_are_printed(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JSON and as text; the bisection, twelve replays, is made once for both."""
    search, known = CapacityTask.carried_load, dict[int, float | None]()

    def once(task: CapacityTask, n: int) -> float | None:
        if n not in known:
            known[n] = search(task, n)
        return known[n]

    monkeypatch.setattr(CapacityTask, "carried_load", once)
    trace = ["synthetic:agents", "--config", config, "--seconds", "90", "--load", "1.5", "--engines", "1..4"]
    assert run(*trace, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert run(*trace) == 0
    text = capsys.readouterr().out
    needed = told["engines"]
    assert 1 < needed <= 4
    assert f"{needed} engines: agent would meet" in text
    assert f"with {needed - 1}" in text
    assert f"the 2 engines of main carry {told['carried_load']:.2f} times the trace" in text
    by_size = {row["engines"]: row for row in told["curve"]}
    assert list(by_size) == [1, 2, 3, 4]
    assert all(share["lower"] >= min(share["target"], share["highest"]) for share in by_size[needed]["shares"])
    assert any(share["lower"] < min(share["target"], share["highest"]) for share in by_size[needed - 1]["shares"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--pool", "mian"], "no pool of engines has this name; did you mean 'main'?"),
        (["--engines", "4..2"], "write LOW..HIGH"),
        (["--engines", "0..2"], "write LOW..HIGH"),
    ],
)
def test_a_wrong_argument_is_named(config: str, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("synthetic:agents", "--config", config, *argv) == 2
    assert said in capsys.readouterr().err


def test_a_configuration_without_budgets_has_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "batch.yaml"
    file.write_text(CONFIG.replace("workload: agent", "workload: batch"))
    assert run("synthetic:agents", "--config", str(file)) == 2
    assert "no route of the configuration has a budget" in capsys.readouterr().err


def test_a_log_of_the_gateway_is_an_answer(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a conversation asks the same again."""
    rows = [
        RECORD.view(
            record(
                wall=3.0 * step,
                total=1.0,
                route="agent",
                prompt_tokens_estimated=900,
                lineage=Lineage(conversation=7, step=step + 1, kept=800, link=Link.CONVERSATION),
            )
        )
        for step in range(12)
    ]
    log = tmp_path / "access.log"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(str(log), "--config", config, "--engines", "1..2", "--no-load") == 0
    assert "engine" in capsys.readouterr().out
