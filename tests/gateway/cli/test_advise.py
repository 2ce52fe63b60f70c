"""`firsttoken advise`: a report of an access log, as Markdown and as one page, and the log without its breaks."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import main
from gateway.observe.record_columns import RECORD
from tests.gateway.parts.test_prefix_doctor import Watched
from tests.support.agent_prompts import PLANTS, agent_turns

HOSTILE = "<script>alert(1)</script>|\x1b[2J"
DAY = 86_400


def log_of(path: Path, kind: str, *, grows: bool = False) -> Path:
    """A log of agent sessions in two weeks, with a break planted."""
    watched = Watched()
    turns = agent_turns(PLANTS[kind], scale=0.2)
    rows = []
    for week in (0, 1):
        for turn in turns:
            if grows and week:
                turn.body["messages"][0]["content"] += "And a rule more. " * 400
            made = watched.answer(turn.body, turn.at + week * 7 * DAY)
            made.tenant, made.wall = HOSTILE, 1.7e9 + turn.at + week * 7 * DAY
            rows.append(json.dumps(RECORD.view(made)))
    path.write_text("\n".join(rows) + "\n")
    return path


def test_a_log_becomes_a_report_with_the_mend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dearest place first; the name of a caller is neither markup nor a command to the terminal."""
    log = log_of(tmp_path / "access.jsonl", "timestamp", grows=True)
    page = tmp_path / "report.html"
    assert main(["advise", "--from", str(log), "--html", str(page)]) == 0
    told, shown = capsys.readouterr().out, page.read_text()
    assert "| timestamp |" in told
    assert "Write the time behind everything that stays the same" in told
    assert "has grown by" in told
    assert "\x1b" not in told
    assert 'role="alert"' in shown
    assert "<svg" in shown
    assert "<script" not in shown
    assert "http" not in shown.replace("routes.chat", "")


def test_the_mended_log_shares_what_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many lines, which begin alike from turn to turn."""
    log, out = log_of(tmp_path / "access.jsonl", "uuid"), tmp_path / "mended.jsonl"
    assert main(["advise", "--from", str(log), "--mended", str(out)]) == 0
    before, after = (fourth_landmarks(each) for each in (log, out))
    assert len(before) == len(after)
    assert len({*after}) < len({*before}) / 4
    capsys.readouterr()


def fourth_landmarks(log: Path) -> list[bytes]:
    """Of each line, the fourth landmark of its prompt, which is behind the break."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [b64decode(row["prefix"])[24:32] for row in rows]


@pytest.mark.parametrize(("text", "told"), [("nonsense\n", "not an access log"), ('{"a": 1}\n', "no line tells")])
def test_what_is_no_log_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str) -> None:
    (path := tmp_path / "x.jsonl").write_text(text)
    assert main(["advise", "--from", str(path)]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("member", "value"),
    [("wall", 1e400), ("prefix", 7), ("cached_tokens_reported", "x")],
)
def test_a_line_with_an_impossible_value_is_an_error_of_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], member: str, value: Any
) -> None:
    """A log that another program wrote, or that was edited, is no fault of ours."""
    log = log_of(tmp_path / "access.jsonl", "uuid")
    rows = [{**json.loads(line), member: value} for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["advise", "--from", str(log), "--mended", str(tmp_path / "mended.jsonl")]) == 2
    assert "this version's access log" in capsys.readouterr().err
