"""Keys, orders, filters and widths of `firsttoken top`."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gateway.cli.arguments import ORDERS
from gateway.cli.top_tables import LONGEST, ROUTES, Look, Sort, View, frame
from tests.support.gateways import pool, running
from tests.support.terminal import TERMINAL, until

ROOT = Path(__file__).parents[3]


async def test_keys_sort_filter_and_quit() -> None:
    """Without Enter, at once; the terminal is left as it was."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    shown = os.fdopen(ours, "r+b", buffering=0)
    async with running({"only": pool("http://127.0.0.1:9")}) as gateway:
        command = ("-m", "gateway.cli", "top", "--admin", gateway.admin_url, "--interval", "60")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command), cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=TERMINAL
        )
        await asyncio.to_thread(until, shown, b"sort: configured")
        shown.write(b"s")
        await asyncio.to_thread(until, shown, b"sort: worst")
        shown.write(b"/cq")  # text of the filter, not a key
        await asyncio.to_thread(until, shown, b"filter: cq_")
        shown.write(b"\x1b")
        await asyncio.to_thread(until, shown, b"filter: none")
        shown.write(b"q")
        await asyncio.to_thread(until, shown, b"\x1b[?1049l")
        assert await process.wait() == 0
    assert termios.tcgetattr(theirs) == before
    os.close(theirs)
    shown.close()


def typed(keys: list[str], view: View | None = None) -> View:
    for key in keys:
        view = (view or View()).after(key)
    assert view is not None
    return view


def test_s_goes_through_all_orders() -> None:
    """Of the command line too."""
    assert [typed(["s"] * count).sort for count in range(1, 5)] == [*list(Sort)[1:], Sort.CONFIGURED]
    assert tuple(Sort) == ORDERS


def test_a_filter_is_typed_and_cleared() -> None:
    """Enter keeps it, Escape clears it; keys of commands are text, and special keys nothing."""
    assert typed(list("/chqx\x7f\r")) == View(filter="chq")
    assert typed(["/", *"ch", "\x1b[A", "\n", "\x1b"]) == View()
    assert typed(["\x1b[A", "x"]) == View()
    assert typed(["/", *"x" * 100]).filter == "x" * LONGEST
    assert typed(["/", "q"]).ended is False
    assert typed(["q"]).ended


def route_of(name: str, met: float, requests: float, pool: str) -> dict[str, Any]:
    return {
        "route": name,
        "ttft_budget_ms": 2000.0,
        "ttft_target": 0.9,
        "ttft_budget_grows": False,
        "held": 0.0,
        "figures": {
            **dict.fromkeys(("goodput", "hit", "tpot_p95_ms", "longest_gap_p95_ms")),
            "requests_per_s": requests,
            "shed_per_s": 0.0,
            "failed_per_s": 0.0,
            "met": met,
            "ttft_ms": {"p50": 500.0, "p95": 950.0, "p99": 990.0},
            "pools": {pool: 1.0},
        },
    }


def endpoint_of(name: str, health: str, in_flight: int, error: float) -> dict[str, Any]:
    load = {"health": health, "in_flight": in_flight, "ahead": 1e5, "running": 10, "waiting": 10, "kv_usage": 1.0}
    return {
        "endpoint": {"id": name},
        "why": "",
        "load": load,
        "calibration": {"under_p90": 0.915},
        "error": [0.51, error, 12.11],
        "tried_again_in_s": 0,
        "scraped_s_ago": 1.0,
        "samples": 123456,
    }


BUSY = Look(
    {
        "window": "now",
        "gateway": {"loop_stalls": 0.0, "loop_lag_ms": {"le": [2.5], "counts": [0.0, 0.0]}},
        "routes": [route_of("chat", 0.995, 100.0, "small"), route_of("agent-loops", 0.421, 5000.0, "large-model")],
    },
    [
        endpoint_of("large-model/10.0.1.11:8000", "up", 2, 3.0),
        endpoint_of("small/10.0.0.11:8000", "down", 1, 1.0),
        endpoint_of("small/10.0.0.12:8000", "up", 9, 1.0),
    ],
    [],
)


def lines_of(view: View, width: int = 80) -> list[str]:
    console = Console(width=width, no_color=True)
    with console.capture() as captured:
        console.print(frame("http://127.0.0.1:9090", BUSY, view, width))
    return captured.get().splitlines()


def names(view: View) -> list[str]:
    """First cells, without headings."""
    firsts = [line.split()[0] for line in lines_of(view) if line.strip()]
    return [name for name in firsts if name in ("chat", "agent-loops") or "/10." in name]


def test_every_cell_is_whole_at_80_columns() -> None:
    """Columns are left out instead; a wide terminal has all."""
    narrow, wide = lines_of(View()), lines_of(View(), 160)
    assert max(map(len, narrow)) <= 80
    assert not [line for line in (*narrow, *wide) if "…" in line]
    kept = ("met", "req/s", "p95", "budget", "shed/s", "state", "in flight", "KV", "waiting")
    assert [name for name in kept if not any(name in line for line in narrow)] == []
    assert [name for name in ROUTES if not any(name in line for line in wide)] == []


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        (Sort.CONFIGURED, ["chat", "agent-loops", "large-model/10.0.1.11:8000", "small/10.0.0.11:8000"]),
        (Sort.WORST, ["agent-loops", "chat", "small/10.0.0.11:8000", "large-model/10.0.1.11:8000"]),
        (Sort.TRAFFIC, ["agent-loops", "chat", "small/10.0.0.12:8000", "large-model/10.0.1.11:8000"]),
        (Sort.NAME, ["agent-loops", "chat", "large-model/10.0.1.11:8000", "small/10.0.0.11:8000"]),
    ],
)
def test_tables_are_sorted(sort: Sort, expected: list[str]) -> None:
    assert names(View(sort))[:4] == expected


def test_a_filter_leaves_rows_whose_names_contain_it() -> None:
    """A route by its name or by the pool that answered."""
    assert names(View(filter="LARGE")) == ["agent-loops", "large-model/10.0.1.11:8000"]
    assert names(View(filter="chat")) == ["chat"]
    assert names(View(filter="nothing")) == []
