"""What-ifs of a replay: each is what a configuration, or a log, says that has the change written out."""

from __future__ import annotations

import json
from array import array
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import main
from lab.commands import add_commands

pytestmark = pytest.mark.usefixtures("_files")
SESSIONS, TURNS, SPAN = 4, 8, 512
SYSTEM, TURN = 5_120, 512  # tokens
KEPT = 512  # tokens before the break

ONE = """\
pools:
  main: {backend: simulated, model: m, profile: 8b-l4, endpoints: ["http://h0:80"]}
  large: {backend: simulated, model: m, profile: 8b-h100, endpoints: ["http://h9:80"]}
routes: {chat: {tiers: [main], ttft: {budget: 1s}, tpot: "off", on_miss: best_effort}}
"""
CHANGES = {
    "main+1": ("attainment", '"http://h0:80"', '"http://h0:80", "http://h1:80"'),
    "chat.ttft=3s": ("attainment", "budget: 1s", "budget: 3s"),
    "chat.first=large": ("preferred", "[main, large]", "[large, main]"),
}


@pytest.fixture
def _files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(ONE)
    _write("burst.jsonl", (_line(n, 0, n * 0.45, [hash(("burst", n, i)) for i in range(4)]) for n in range(40)))
    _write("broken.jsonl", agents(is_broken=True))
    _write("clean.jsonl", agents(is_broken=False))


def _write(name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def agents(*, is_broken: bool) -> Iterator[Mapping[str, Any]]:
    """Sessions whose prompts grow. With a break, nothing behind KEPT tokens is as in the turn before."""
    for turn in range(TURNS):
        for session in range(SESSIONS):
            count = (SYSTEM + turn * TURN) // SPAN
            version = turn if is_broken else 0
            marks = [hash((session, i, version if i * SPAN >= KEPT else 0)) for i in range(count)]
            lost = count * SPAN - TURN - KEPT
            broken = {"class": "uuid", "role": "system", "at_tokens": KEPT, "lost_tokens": lost, "block": 1}
            yield _line(turn, session, turn * 12.0 + session * 3.0, marks) | {
                "session": f"{session:016x}",
                "template": None,
                "continues": "conversation" if turn else "nothing",
                "kept_tokens": KEPT if is_broken else count * SPAN - TURN,
                "prefix_break": broken if is_broken and turn else None,
            }


def _line(number: int, session: int, at: float, marks: list[int]) -> dict[str, Any]:
    prefix = b64encode(array("Q", [mark & 0xFFFF_FFFF_FFFF_FFFF for mark in marks])).decode()
    sizes = {"prompt_tokens_reported": len(marks) * SPAN + SPAN // 2, "output_tokens": 8}
    return {"wall": 1e9 + at, "route": "chat", "tenant": "a", "end": "completed", "prefix": prefix, **sizes}


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Mapping[str, Any]]:
    """The row of all routes, by name."""
    lean = (*arguments, "--config", "a.yaml", "--scorers", "none", "--no-reference", "--json")
    assert main(["replay", *lean], [add_commands]) == 0
    return {each["name"]: each["rows"][-1] for each in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("change", CHANGES)
def test_a_what_if_is_as_good_as_the_configuration_with_the_change(
    change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Direction: more requests in time under an overload, or by the first pool; size: that of the changed file."""
    figure, old, new = CHANGES[change]
    base = ONE.replace("tiers: [main]", "tiers: [main, large]") if "first" in change else ONE
    Path("a.yaml").write_text(base)
    Path("b.yaml").write_text(base.replace(old, new))
    rows = replayed(capsys, "burst.jsonl", "--what-if", change, "--config-b", "b.yaml")
    changed, written = rows[f"with {change}"], rows["config b"]
    assert changed["attainment"] == pytest.approx(written["attainment"], abs=0.03)
    assert changed["ttft"][0] == pytest.approx(written["ttft"][0], rel=0.05)
    assert changed["tiers"] == written["tiers"]
    assert changed[figure] > rows["ours"][figure] + 0.2


@pytest.mark.parametrize("cls", ["uuid", "all"])
def test_a_repaired_log_is_as_good_as_one_that_never_broke(cls: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All turns but the first of each session find their prompt cached, and make the budget."""
    rows = replayed(capsys, "broken.jsonl", "--what-if", f"chat.repair={cls}")
    (clean,) = replayed(capsys, "clean.jsonl").values()
    repaired = rows[f"with chat.repair={cls}"]
    assert rows["ours"]["attainment"] == 0
    assert rows["ours"]["hit"] < 0.1
    assert repaired["attainment"] == clean["attainment"] == 1 - 1 / TURNS
    assert repaired["hit"] == pytest.approx(clean["hit"], abs=0.01)
    assert repaired["ttft"] == pytest.approx(clean["ttft"], rel=0.02)


@pytest.mark.parametrize("source", ["chat=other.jsonl", "other.jsonl"], ids=["as told", "as the only route"])
def test_a_log_of_a_route_of_another_name_is_repaired_too(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The route of a what-if is the one that the requests are replayed on, whatever the log calls it."""
    _write("other.jsonl", ({**row, "route": "helpdesk"} for row in agents(is_broken=True)))
    rows = replayed(capsys, source, "--what-if", "chat.repair=uuid")
    assert rows["ours"]["attainment"] == 0
    assert rows["with chat.repair=uuid"]["attainment"] == 1 - 1 / TURNS


def test_a_repair_of_one_route_leaves_a_log_on_another_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Even where both logs name the same route: at most one half of the requests makes the budget."""
    desk = "  desk: {tiers: [main], ttft: {budget: 1s}, tpot: 'off', on_miss: best_effort}\n"
    Path("a.yaml").write_text(ONE.replace("routes: {", "routes:\n  ").replace("best_effort}}", "best_effort}") + desk)
    _write("other.jsonl", agents(is_broken=True))
    rows = replayed(capsys, "chat=broken.jsonl", "desk=other.jsonl", "--what-if", "chat.repair=all")
    assert rows["ours"]["attainment"] == 0
    assert 0 < rows["with chat.repair=all"]["attainment"] <= 0.5


def test_a_repair_tells_its_interval_in_text_and_page(capsys: pytest.CaptureFixture[str]) -> None:
    """As every policy of the replay; the page is written beside JSON too."""
    row = replayed(capsys, "broken.jsonl", "--what-if", "chat.repair=all", "--html", "r.html")["with chat.repair=all"]
    low, high = row["interval"]
    assert low < row["attainment"] < high
    page = Path("r.html").read_text()
    assert '<td>with chat.repair=all</td><td><div class="bar">' in page
    assert f"<td>{low:.1%} to {high:.1%}</td>" in page
    told = page.split("<pre>")[1]
    assert "with chat.repair=all" in told
    assert f"{low * 100:.0f}-{high * 100:.0f}%" in told


@pytest.mark.parametrize(
    ("log", "change", "told"),
    [
        ("broken.jsonl", "chat.repair=timestamp", "breaks of route chat: uuid (28)"),
        ("clean.jsonl", "chat.repair=all", "breaks of route chat: none"),
        ("broken.jsonl", "chat.repair=uid", "no class of breaks 'uid'; did you mean 'uuid'?"),
        ("broken.jsonl", "chta.repair=uuid", "no route 'chta'; did you mean 'chat'?"),
    ],
)
def test_a_repair_of_no_break_names_the_breaks_that_there_are(
    log: str, change: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row without any change would look like an answer."""
    lean = ("--config", "a.yaml", "--scorers", "none", "--no-reference")
    assert main(["replay", log, *lean, "--what-if", change], [add_commands]) == 2
    assert told in capsys.readouterr().err
