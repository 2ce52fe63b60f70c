"""`firsttoken replay`: output and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import main
from lab.commands import add_commands
from tests.support.builders import calling, post
from tests.support.gateways import running
from tests.support.replay_builders import CONFIG, agent_sessions, mooncake
from tests.support.simulated import engine_pool, engines, eventually

ROOT = Path(__file__).parents[3]
EMPTY = "no usable request; each line needs its prompt and output tokens"
NUMBERS = "write numbers above 0, such as 1, 0.6,1,1.4 or 0.6..1.4"


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two configurations and a trace; one core, because threads of other tests must not be forked."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(CONFIG)
    Path("b.yaml").write_text(CONFIG.replace("8b-h100", "8b-l4"))
    mooncake(Path("trace.jsonl"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["replay", *arguments], [add_commands])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def played(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    code, out, err = run(capsys, "trace.jsonl", "--config", "a.yaml", "--json", *arguments)
    assert (code, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out)
    return found


def test_the_table_compares(capsys: pytest.CaptureFixture[str]) -> None:
    """The configuration, the baselines and the reference, then the routes; at most 120 columns."""
    code, out, err = run(capsys, "trace.jsonl", "--config", "a.yaml", "--scorers", "lmetric,pooled:least_request")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith("load 1: 40 requests in 10 s, 4.10 per second; ")
    names = [line.partition("  ")[0] for line in lines[1:6]]
    assert names == ["", "this config", "lmetric", "pooled:least_request", "reference"]
    assert next(line for line in lines if line.startswith("agent")).split()[1:3] == ["40", "100.0%"]
    assert next(line for line in lines if line.startswith("main")).split()[1] == "40"
    assert max(map(len, lines)) <= 120


def test_ours_is_shown_less_the_best_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    """By good requests, the reference aside: points, and ms of three quantiles of the TTFT. Alone it has no line."""
    arguments = "trace.jsonl", "--config", "a.yaml", "--load", "8", "--scorers"
    rows = {row["name"]: row["rows"][-1] for row in played(capsys, *arguments[3:], "lmetric,round_robin")}
    best = max(("lmetric", "round_robin"), key=lambda name: float(rows[name]["good"]))
    ours, peer = rows["ours"], rows[best]
    slower = [f"{(a - b) * 1e3:+.0f} ms" for a, b in zip(ours["ttft"], peer["ttft"], strict=True)]
    points = f"good {(ours['good'] - peer['good']) * 100:+.1f} points"
    _, out, _ = run(capsys, *arguments, "lmetric,round_robin")
    assert f"this config less {best}: {points}, p50 {slower[0]}, p90 {slower[1]}, p99 {slower[2]}" in out.splitlines()
    assert "this config less" not in run(capsys, *arguments, "none")[1]


def test_constant_columns_are_omitted(capsys: pytest.CaptureFixture[str]) -> None:
    """With one tier, no price and no failure the columns USD, tiers, failed and hedges are omitted."""
    _, out, _ = run(capsys, "trace.jsonl", "--config", "a.yaml", "--scorers", "none")
    heading = out.splitlines()[1].split()
    assert [name for name in ("USD", "tiers", "failed", "hedges") if name in heading] == []


def test_two_policies_on_the_same_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    """--config-b has slower engines; the routes of both configurations are shown."""
    arguments = ("trace.jsonl", "--config", "a.yaml", "--config-b", "b.yaml", "--scorers", "none", "--no-reference")
    _, out, _ = run(capsys, *arguments)
    rows = {line.split("  ")[0]: line for line in out.splitlines() if line.startswith(("this config  ", "config b  "))}
    assert sorted(rows) == ["config b", "this config"]
    found = {result["name"]: result["rows"][-1]["ttft"][0] for result in played(capsys, *arguments[3:])}
    assert found["config b"] > 3 * found["ours"]


def test_a_range_of_loads_is_five(capsys: pytest.CaptureFixture[str]) -> None:
    """LOW..HIGH gives five equidistant loads; a list gives the listed loads."""
    lean = ("--scorers", "none", "--no-reference")
    swept, listed = (played(capsys, "--load", load, *lean) for load in ("0.5..1.5", "2,1"))
    assert [result["load"] for result in swept] == [0.5, 0.75, 1.0, 1.25, 1.5]
    assert [(result["load"], result["seconds"]) for result in listed] == [(1.0, 9.75), (2.0, 4.875)]


def test_seeds_are_played_each_and_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds count up from --seed; equal seeds give equal results."""
    lean = ("--scorers", "none", "--no-reference")
    three = played(capsys, "--seed", "4", "--seeds", "3", *lean)
    one = played(capsys, "--seed", "5", *lean)
    assert [result["seed"] for result in three] == [4, 5, 6]
    assert three[1]["rows"] == one[0]["rows"]
    assert three[0]["rows"] != one[0]["rows"]
    _, out, _ = run(capsys, "trace.jsonl", "--config", "a.yaml", "--seeds", "2", *lean)
    assert "per second, mean of 2 seeds; " in out


def test_all_cores_make_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """Scenarios and results are pickled for other processes, conditions of tiers included."""
    Path("a.yaml").write_text(CONFIG.replace("[main]", "[{pool: main, when: {prompt_tokens: '<= 30000'}}]"))
    inline = played(capsys, "--scorers", "lmetric")
    arguments = ["trace.jsonl", "--config", "a.yaml", "--scorers", "lmetric", "--json"]
    command = [sys.executable, "-m", "lab", "replay", *arguments]
    shared = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
    assert [result["rows"] for result in json.loads(shared.stdout)] == [result["rows"] for result in inline]


def test_a_trace_can_be_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """By a number of requests per trace, or by seconds of the replay."""
    lean = ("--scorers", "none", "--no-reference")
    assert played(capsys, "--limit", "7", *lean)[0]["rows"][-1]["offered"] == 7
    assert played(capsys, "--load", "2", "--seconds", "3", *lean)[0]["rows"][-1]["offered"] == 24


def test_the_worst_decisions_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Each decision is shown with all candidates, in the format of `firsttoken explain`."""
    hurt = ("--fault", "main/h0:80@0s=slow:8", "--scorers", "none", "--no-reference", "--worst", "2")
    _, out, _ = run(capsys, "trace.jsonl", "--config", "a.yaml", *hurt)
    assert out.count("this config, load 1: regret of ") == 2
    assert len([line for line in out.splitlines() if line.split()[:3] == ["endpoint", "tier", "p50"]]) == 2
    worst = played(capsys, *hurt)[0]["worst"]
    assert [told["rank"] for told in worst] == [1, 2]
    assert worst[0]["regret_ms"] >= worst[1]["regret_ms"] > 0
    assert {candidate["endpoint"] for candidate in worst[0]["candidates"]} == {"main/h0:80", "main/h1:80"}


def test_faults_befall_endpoints(capsys: pytest.CaptureFixture[str]) -> None:
    """Faults occur at the given times in every replay."""
    kill = ("--fault", "main/h0:80@1s=kill", "main/h1:80@1s=kill", "--scorers", "least_request", "--no-reference")
    for result in played(capsys, *kill):
        assert result["rows"][-1]["completed"] < 8


def test_batch_routes_show_completed_requests_and_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    """A route without budgets is reported by completed requests and throughput."""
    Path("a.yaml").write_text(CONFIG.replace("workload: agent", "workload: batch"))
    _, out, _ = run(capsys, "trace.jsonl", "--config", "a.yaml", "--scorers", "none")
    assert "agent: 40 of 40 completed, 164 output tokens per second" in out


def test_guessed_machines_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The assumed profile is printed on stderr: results depend on the simulated servers."""
    Path("a.yaml").write_text(CONFIG.replace("    profile: 8b-h100\n", ""))
    code, _, err = run(capsys, "trace.jsonl", "--config", "a.yaml", "--scorers", "none", "--no-reference")
    assert (code, err) == (0, "firsttoken: pool main has no `profile`: assuming 8b-h100\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "firsttoken: nowhere.jsonl: cannot be read: No such file or directory"),
        (["synthetic:agnets"], "firsttoken: synthetic:agnets: unknown synthetic trace; known: synthetic:agents"),
        (["chat=trace.jsonl"], "firsttoken: no route 'chat'; known: agent"),
        (
            ["trace.jsonl", "--load", "0"],
            f"firsttoken: --load 0: {NUMBERS}",
        ),
        (
            ["trace.jsonl", "--load", "1.."],
            f"firsttoken: --load 1..: {NUMBERS}",
        ),
        (["trace.jsonl", "--closed"], "firsttoken: --closed: no trace holds sessions"),
        (
            ["trace.jsonl", "--sessions", "0"],
            "firsttoken: argument --sessions: '0' is not a number above 0 (see firsttoken replay --help)",
        ),
        (["trace.jsonl", "--seeds", "0"], "firsttoken: --seeds 0: must be at least 1"),
        (
            ["trace.jsonl", "--score-per-1k", "40"],
            "firsttoken: --score-per-1k 40: '40' has no unit of time; write it like 250ms, 2s or 5m",
        ),
        (["trace.jsonl", "--limit", "0"], f"firsttoken: trace.jsonl: {EMPTY}"),
        (
            ["trace.jsonl", "--scorers", "lmetrics"],
            "firsttoken: --scorers: no scorer 'lmetrics'; did you mean 'lmetric'?",
        ),
        (
            ["trace.jsonl", "--fault", "main/h0:80@9=kill"],
            "firsttoken: --fault main/h0:80@9=kill: '9' has no unit of time; write it like 250ms, 2s or 5m",
        ),
        (
            ["trace.jsonl", "--fault", "main/h7:80@9s=kill"],
            "firsttoken: --fault main/h7:80@9s=kill: no endpoint 'main/h7:80'; did you mean 'main/h1:80'?",
        ),
        (
            ["trace.jsonl", "--fault", "kill"],
            "firsttoken: --fault kill: write ENDPOINT@TIME=WHAT, such as main/h1:8000@90s=slow:5, =kill or =restart",
        ),
        (
            ["trace.jsonl", "--seeds", "many"],
            "firsttoken: argument --seeds: 'many' is not a whole number (see firsttoken replay --help)",
        ),
    ],
)
def test_wrong_arguments_are_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """The error is one line, printed before the first replay."""
    assert run(capsys, *arguments, "--config", "a.yaml") == (2, "", message + "\n")


def test_a_wrong_configuration_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors read as in `firsttoken check`; a configuration without routes cannot be replayed."""
    Path("a.yaml").write_text(CONFIG + "servr: {}\n")
    code, _, err = run(capsys, "trace.jsonl", "--config", "a.yaml")
    assert (code, err) == (2, "a.yaml:9: servr: unknown key; did you mean 'server'?\n")
    code, _, err = run(capsys, "trace.jsonl")
    missing = "the following arguments are required: --config, or --live URL (see firsttoken replay --help)"
    assert (code, err) == (2, f"firsttoken: {missing}\n")


def test_sessions_are_scored_by_request_and_by_session(capsys: pytest.CaptureFixture[str]) -> None:
    """In a closed loop a slow fleet is offered fewer turns, and its sessions take longer than on an idle fleet."""
    agent_sessions(Path("sessions.jsonl"))
    lean = ("--scorers", "none", "--no-reference", "--sessions", "1.5", "--seconds", "60", "--closed")
    arguments = ("sessions.jsonl", "--config", "a.yaml", "--config-b", "b.yaml", *lean)
    code, out, _ = run(capsys, *arguments)
    table = out[out.index("by session") :].splitlines()
    assert (code, table[0].split()[2:4]) == (0, ["sessions", "turns"])
    assert [line.split("  ")[0] for line in table[1:3]] == ["this config", "config b"]
    assert max(map(len, out.splitlines())) <= 120
    _, out, _ = run(capsys, *arguments, "--json")
    ours, other = json.loads(out)
    assert ours["sessions"]["good"] > other["sessions"]["good"]
    assert ours["sessions"]["sessions"] == other["sessions"]["sessions"]
    assert other["rows"][-1]["offered"] < 0.9 * ours["rows"][-1]["offered"]


def test_other_traces_have_no_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the tables nor in the legend; null in JSON."""
    lean = ("--scorers", "none", "--no-reference")
    _, out, _ = run(capsys, "trace.jsonl", "--config", "a.yaml", *lean)
    assert "session" not in out
    assert played(capsys, *lean)[0]["sessions"] is None


async def test_an_access_log_can_be_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An access log holds times, lengths and shared prefixes of prompts, and no text."""
    log, begin = tmp_path / "access.log", "tell me of ships and the sea " * 300
    async with (
        engines(1, speed=50.0) as servers,
        running({"main": engine_pool(*servers)}, telemetry={"access_log": str(log)}) as gateway,
        calling(gateway.url) as caller,
    ):
        for end in ("and of storms", "and of calms"):
            asked = {"model": "chat", "max_tokens": 5, "messages": [{"role": "user", "content": begin + end}]}
            assert (await caller.whole(post(asked)))[0] == 200
        await eventually(lambda: log.exists() and log.read_bytes().count(b"\n") == 2)
    assert b"ships" not in log.read_bytes()
    code, out, _ = run(capsys, f"agent={log}", "--config", "a.yaml", "--scorers", "none", "--json")
    ours, reference = json.loads(out)
    assert (code, ours["rows"][-1]["completed"]) == (0, 2)
    assert reference["rows"][-1]["hit"] > 0.4
