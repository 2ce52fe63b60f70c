"""`firsttoken top`: a running gateway in a terminal, through the admin port alone."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from gateway.cli.main import main
from gateway.cli.top_tables import (
    ROUTES,
    Look,
    View,
    age,
    frame,
    gateway_summary,
    largest_stage,
    ms,
    route_row,
)
from gateway.observe.record import STAGE_NAMES, Record, Stage
from tests.support.builders import CHAT, calling, post
from tests.support.gateways import pool, running
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.terminal import TERMINAL, until
from tests.support.upstream import Upstream

ROOT = Path(__file__).parents[3]
STREAM = {**CHAT, "stream": True, "max_tokens": 3}


async def ask(url: str, times: int, *headers: str) -> None:
    for _ in range(times):
        async with calling(url) as caller:
            await caller.ask(post(STREAM, *headers))
            await caller.chunks()


async def test_once_prints_one_frame(capsys: pytest.CaptureFixture[str]) -> None:
    """A row per route and endpoint; the slowest requests with the longest stage; exit code 0."""
    async with engines(1) as one, running({"only": engine_pool(*one), "dead": pool("http://127.0.0.1:9")}) as gateway:
        await ask(gateway.url, 3, "x-request-id: slow-request")
        await eventually(lambda: gateway.recorder.live == 0)
        assert await asyncio.to_thread(main, ["top", "--once", "--admin", gateway.admin_url]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert lines[0][0] == gateway.admin_url
    (chat,) = (line for line in lines if line[0] == "chat")
    assert float(chat[4]) > 0
    assert chat[-2:] == ["only", "100%"]
    assert [line[1] for line in lines if line[0].startswith("only/")] == ["up"]
    recent = [line for line in lines if line[-1] == "slow-request"]
    slowest = [line for line in recent if line[line.index("ago") + 1] == "chat"]  # not the table of incidents
    assert len(slowest) == 3
    told = [next(word for word in line if word in STAGE_NAMES) for line in slowest]
    assert sorted(told) == sorted(longest_stage(record) for record in gateway.recorder.recent)


def longest_stage(record: Record) -> str:
    """Before the first token: `upstream`, but on a busy machine."""
    stages = {stage: spent for stage, spent in record.stages.items() if stage is not Stage.STREAM}
    return STAGE_NAMES[max(stages, key=lambda stage: stages[stage])]


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9"),
        ("127.0.0.1:9/", "http://127.0.0.1:9"),
        ("9", "http://127.0.0.1:9"),
        (":9", "http://127.0.0.1:9"),
        ("[::1]:9", "http://[::1]:9"),
        ("127.0.0.1", "http://127.0.0.1:9090"),
        ("http://x y", "http://x y"),
    ],
)
@pytest.mark.parametrize(
    "command", [["top", "--once"], ["why", "0123"], ["explain", "r.json"], ["advise"], ["agents", "codex"]]
)
def test_an_address_needs_no_scheme(
    command: list[str],
    url: str,
    asked: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--admin` is the word of every command; a single error line."""
    monkeypatch.chdir(tmp_path)
    Path("r.json").write_text('{"model": "chat", "messages": []}')
    code = main([*command, "--admin", url])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{asked}: this is not the admin port of a running gateway: ")


@pytest.mark.parametrize("url", ["http://[::1", "ftp://a", "http://me:secret@[", "127.0.0.1:99999", "http://a/?b", ""])
def test_a_wrong_address_is_exit_code_2(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A single error line, without a password."""
    code = main(["top", "--once", "--admin", url])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n"), "secret" in err) == (2, "", 1, False)
    assert "is not an address of HTTP, such as http://127.0.0.1:9090 (see firsttoken top --help)" in err


def test_the_spellings_of_before_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    """Of `advise` and `agents`."""
    for command, port in ((["advise", "--from"], "admin"), (["agents", "codex", "--url"], "data")):
        for url in ("127.0.0.1:9", "http://127.0.0.1:9"):
            assert main([*command, url]) == 2
            assert capsys.readouterr().err.startswith(f"http://127.0.0.1:9: this is not the {port} port of a running")


async def test_the_data_port_is_refused_as_admin_port(capsys: pytest.CaptureFixture[str]) -> None:
    """The error line says so."""
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway:
        code = await asyncio.to_thread(main, ["top", "--once", "--admin", gateway.url])
    assert (code, capsys.readouterr().err) == (
        2,
        f"{gateway.url}: this is not the admin port of a running gateway: HTTP 404\n",
    )


@pytest.mark.parametrize("window", ["now", "1h"])
async def test_an_older_gateway_is_refused_by_name(window: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It knows no window `now`, and no figures in the others."""
    refused = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
    counts = b'HTTP/1.1 200 OK\r\ncontent-length: 27\r\nconnection: close\r\n\r\n{"window":"1h","routes":[]}'
    async with Upstream([refused if window == "now" else counts]) as older:
        code = await asyncio.to_thread(main, ["top", "--once", "--window", window, "--admin", older.url])
    told = "this is not the admin port of a running gateway: its figures are those of an older version"
    assert (code, capsys.readouterr().err) == (2, f"{older.url}: {told}\n")


async def test_a_lost_gateway_is_retried() -> None:
    """A single line outside a terminal; tables continue after the reconnect."""
    dead = {"only": pool("http://127.0.0.1:9")}
    async with running(dead) as gateway:
        admin = gateway.admin_url
        command = ("-m", "gateway.cli", "top", "--admin", admin, "--interval", "0.1")
        process = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, stdout=PIPE, stderr=PIPE)
        await read_until(process, r"route +met")
    await read_until(process, rf"^{admin} has gone away at .* and is tried again: ")
    server = {"listen": "127.0.0.1:0", "admin": admin.removeprefix("http://")}
    async with running(dead, server=server):
        assert "gone away" not in await read_until(process, r"route +met")
        process.send_signal(2)
        _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")


async def test_a_terminal_gets_an_alternate_screen() -> None:
    """An alternate screen, left at exit; the last table stays while the gateway is away."""
    ours, theirs = pty.openpty()
    shown = os.fdopen(ours, "rb", buffering=0)
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway:
        command = ("-m", "gateway.cli", "top", "--admin", gateway.admin_url, "--interval", "0.1")
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=ROOT, stdout=theirs, stderr=theirs, env=TERMINAL
        )
        os.close(theirs)
        output = await asyncio.to_thread(until, shown, b"answered by")
        assert b"\x1b[?1049h" in output
    output = await asyncio.to_thread(until, shown, b"has gone away")
    await asyncio.to_thread(until, shown, b"answered by")
    process.send_signal(2)
    await asyncio.to_thread(until, shown, b"\x1b[?1049l")
    assert await process.wait() == 0
    shown.close()


async def read_until(process: asyncio.subprocess.Process, pattern: str) -> str:
    """All output up to a line that matches."""
    assert process.stdout is not None
    output = ""
    async with asyncio.timeout(60):
        while line := (await process.stdout.readline()).decode():
            if re.search(pattern, line):
                return output
            output += line
    raise AssertionError(f"no output matched {pattern}: {output}")


def test_names_are_escaped_as_text_not_markup() -> None:
    """Names come from a configuration and from callers."""
    entry = {
        "endpoint": {"id": "[bold]a[/]"},
        "error": [0.9, 1.0, 1.1],
        "calibration": None,
        "samples": 0,
        "why": "[red]nobody[/] is there",
        "tried_again_in_s": 3.2,
        "scraped_s_ago": None,
        "load": {"health": "down", "in_flight": 0, "ahead": 0.0, "running": 0, "waiting": 0, "kv_usage": 0.0},
        "health_by_worker": {"1": "down", "2": "up"},
    }
    console = Console(width=130, record=True)
    with console.capture() as captured:
        figures = {"window": "now", "gateway": gateway([0.0, 0.0]), "routes": []}
        console.print(frame("here", Look(figures, [entry], []), View(), 130))
    assert captured.get().count("[bold]a[/]") == 2  # in the table, and before the reason
    assert "[red]nobody[/] is there" in captured.get()
    assert "down, again in 3 s (not to worker 2)" in captured.get()


def gateway(lags: list[float], stalls: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"loop_stalls": stalls, "loop_lag_ms": {"le": [2.5], "counts": lags}, **more}


def test_the_gateway_is_summarised_in_a_line() -> None:
    """Values that are absent are left out."""
    assert gateway_summary(gateway([0.0, 0.0])) == ""
    everything = gateway([9.0, 0.0], 1.0, in_progress=7.0, workers=2.0, replicas=3.0, redis_up=0.0)
    assert gateway_summary(everything) == (
        "7 in progress · loop lag under 2.5 ms, 1 stall · 2 workers · 3 replicas · redis DOWN"
    )
    assert gateway_summary(gateway([0.0, 0.0], workers=1.0, replicas=1.0)) == "1 worker · 1 replica"
    assert gateway_summary(gateway([9.0, 1.0], redis_up=1.0)) == "loop lag over 1 s, no stall · redis up"


def test_loop_lag_is_the_bound_of_the_last_bucket_that_grew() -> None:
    """Above all bounds it is only known to be more."""
    lags = {"le": [1.0, 5.0], "counts": [1.0, 0.0, 0.0]}
    seen = gateway([], loop_lag_ms=lags)
    assert gateway_summary(seen) == "loop lag under 1 ms, no stall"
    lags["counts"][1] = 1.0
    assert gateway_summary(seen) == "loop lag under 5 ms, no stall"
    lags["counts"][2] = 1.0
    assert gateway_summary({**seen, "loop_stalls": 1.0, "workers": 2.0}) == "loop lag over 1 s, 1 stall · 2 workers"


def test_the_largest_stage_precedes_the_first_token() -> None:
    """Stages after the first token do not count."""
    assert largest_stage({"stages_ms": {"queue": 3.0, "upstream": 9.0, "stream": 500.0}}) == ("upstream", 9.0)
    assert largest_stage({"stages_ms": {}}) == ("", 0.0)


def test_times_and_ages_are_formatted_by_magnitude() -> None:
    """Times in ms, long times in s; ages in seconds, minutes or hours."""
    assert [ms(v) for v in (None, 0.4, 812.3, 12_345.0)] == ["–", "0 ms", "812 ms", "12.3 s"]
    assert [age(v) for v in (3.2, 180.0, 9000.0)] == ["3 s", "3 min", "2 h"]


def route(**figures: Any) -> dict[str, Any]:
    """A route of GET /windows."""
    nothing = {**dict.fromkeys(("met", "goodput", "hit", "tpot_p95_ms", "longest_gap_p95_ms")), "pools": {}}
    rates = dict.fromkeys(("requests_per_s", "shed_per_s", "failed_per_s"), 0.0)
    return {
        "route": "chat",
        "ttft_budget_ms": 200.0,
        "ttft_budget_grows": False,
        "ttft_target": 0.9,
        "held": 3.0,
        "figures": {**nothing, **rates, "ttft_ms": dict.fromkeys(("p50", "p95", "p99")), **figures},
    }


def cells(shown: dict[str, Any]) -> dict[str, str]:
    return dict(zip(ROUTES, map(str, route_row(shown)), strict=True))


def test_a_route_is_shown_by_the_figures_of_its_window() -> None:
    ttft = {"p50": 150.0, "p95": 195.0, "p99": 199.0}
    chat = cells(route(requests_per_s=7.0, met=0.8, ttft_ms=ttft, pools={"large": 0.75, "small": 0.25}))
    assert [chat[name] for name in ("req/s", "met", "held", "answered by")] == [
        "7.0",
        "80.0%",
        "3",
        "large 75%  small 25%",
    ]
    assert [chat[name] for name in ("p50", "p95", "p99", "budget")] == ["150 ms", "195 ms", "199 ms", "200 ms"]


@pytest.mark.parametrize(("met", "p95", "red"), [(0.9, 200.0, []), (0.8, 200.0, ["met"]), (1.0, 201.0, ["p95"])])
def test_a_missed_target_and_a_late_p95_are_red(met: float, p95: float, red: list[str]) -> None:
    """The target is 90%, the budget 200 ms."""
    shown = route_row(route(met=met, ttft_ms={"p50": 100.0, "p95": p95, "p99": p95}))
    assert [name for name, cell in zip(ROUTES, shown, strict=True) if isinstance(cell, Text) and cell.style] == red


def test_no_requests_give_a_zero_rate_and_no_quantiles() -> None:
    """The rate is 0; quantiles and attainment are a dash."""
    chat = cells(route())
    assert [chat[name] for name in ("req/s", "p50", "met", "answered by")] == ["0.0", "–", "–", ""]


async def test_a_window_has_the_counts_that_the_gateway_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    """Requests before the command began are in the hour; incidents come first."""
    routes = {"chat": {"tiers": ["only"], "ttft": {"budget": "1us", "target": 0.9}}}
    async with engines(1) as one, running({"only": engine_pool(*one)}, routes) as gateway:
        await ask(gateway.url, 3, "x-request-id: late-request")
        await eventually(lambda: gateway.recorder.live == 0)
        command = ["top", "--once", "--window", "1h", "--admin", gateway.admin_url, "--interval", "0.1"]
        assert await asyncio.to_thread(main, command) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if line.split()]
    chat = next(line for line in lines if line[0] == "chat")
    assert chat[1:3] == ["0.0%", "0.0%"]
    assert "window 1h, of which" in out
    head = next(number for number, line in enumerate(lines) if line[:2] == ["incident", "route"])
    told = [line for line in lines[head : lines.index(chat)] if line[1:2] == ["late"]]
    assert sum(int(line[0]) for line in told) == 3
    assert all(line[2:5] == ["of", "3", "requests:"] and line[-1] == "late-request" for line in told)
