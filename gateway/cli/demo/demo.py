"""`firsttoken demo`: engines, gateway, callers and a live table in one command, without further programs.

The gateway runs in this process; engines and callers run in one child process each, outside the gateway's event loop.
A child ends with its standard input, so no process is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic

from rich.console import Console
from rich.live import Live
from rich.table import Table

from gateway.app import Gateway
from gateway.cli.demo.scene import CALLERS, document
from gateway.cli.top import text_table
from gateway.config.models import Config
from gateway.observe.record import Record, RequestOutcome
from gateway.process import SWITCH_INTERVAL, loop_factory, tune_gc

WINDOW = 30.0  # s of the table
WIDTH = 110  # columns, for an output without a width

HELLO = """[bold]firsttoken demo[/bold]: two small engines, one large, one external API, all simulated.

  base_url  {url}/v1      models: {models}
  metrics   {admin}/metrics   recent requests: {admin}/requests
  live page {admin}/dashboard   in a terminal: firsttoken top --admin {admin}

  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model":"chat","stream":true,"messages":[{{"role":"user","content":"hello"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  print(client.chat.completions.create(model="chat", messages=[{{"role": "user", "content": "hello"}}]))

Ctrl-C ends it.
"""


def demo(args: argparse.Namespace) -> int:
    """`args`: port, admin_port (0: any free port), seconds (None: until Ctrl-C)."""
    logging.getLogger("firsttoken").setLevel(logging.ERROR)  # engines and callers share this machine, which may be slow
    sys.setswitchinterval(SWITCH_INTERVAL)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_demo(args.port, args.admin_port, args.seconds))


async def _demo(port: int, admin_port: int, seconds: float | None) -> int:
    console, stop = Console(), asyncio.Event()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    engines = await _child("engines")
    gateway, callers = None, None
    try:
        assert engines.stdout is not None
        urls = json.loads(await engines.stdout.readline())
        gateway = Gateway(Config.model_validate(document(urls, port, admin_port)))
        await gateway.start(tune_gc)
        models = ", ".join(gateway.config.routes)
        console.print(
            HELLO.format(url=gateway.url, admin=gateway.admin_url, models=models), highlight=False, soft_wrap=True
        )
        callers = await _child("callers", f"{gateway.url}/v1")
        await _watch(gateway, console, stop, seconds)
        return 0
    except OSError as error:
        print(f"firsttoken: cannot listen on port {port} or {admin_port}: {error.strerror}", file=sys.stderr)
        return 2
    finally:
        await _end(callers)
        if gateway is not None:
            await gateway.stop()
        await _end(engines)


async def _watch(gateway: Gateway, console: Console, stop: asyncio.Event, seconds: float | None) -> None:
    """On a terminal a table in place; elsewhere a table now and then."""
    if not console.is_terminal:
        await _repeat(gateway, console.print, stop, 10.0, seconds)
        return
    with Live(console=console, auto_refresh=False) as screen:
        await _repeat(gateway, lambda table: screen.update(table, refresh=True), stop, 0.5, seconds)


async def _repeat(
    gateway: Gateway, show: Callable[[Table], None], stop: asyncio.Event, interval: float, seconds: float | None
) -> None:
    start = monotonic()
    end = float("inf") if seconds is None else start + seconds
    while not stop.is_set() and monotonic() < end:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), min(interval, max(end - monotonic(), 0.01)))
        found = rows(gateway.recorder.recent, [callers.route for callers in CALLERS], monotonic(), start)
        show(render(found, f"last {WINDOW:.0f} s"))


async def _child(*role: str) -> Process:
    """A child in a process group of its own: Ctrl-C reaches this process only, which then ends the child."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.cli.demo.demo_children", *role, stdin=PIPE, stdout=PIPE, start_new_session=True
    )


async def _end(child: Process | None) -> None:
    if child is None:
        return
    if child.stdin is not None:
        child.stdin.close()
    try:
        async with asyncio.timeout(3):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class RouteRow:
    """A route. Times in seconds; shares from 0 to 1; None without any Record."""

    route: str
    per_second: float
    budget: float | None
    p50: float | None
    p99: float | None
    attainment: float | None
    tiers: Mapping[str, float]
    hit: float | None
    shed: float
    failed: int


def rows(records: Iterable[Record], routes: Iterable[str], now: float, since: float) -> list[RouteRow]:
    """`since`: start of counting, so the first seconds are not divided by a whole window."""
    recent = [r for r in records if r.arrival + r.total >= now - WINDOW]
    span = max(min(WINDOW, now - since), 1.0)
    return [_row(route, [r for r in recent if r.route == route], span) for route in routes]


def _row(route: str, records: list[Record], span: float) -> RouteRow:
    ttfts = sorted(r.ttft for r in records if r.ttft is not None and r.stream)
    judged = [r.ttft_met for r in records if r.ttft_met is not None]
    pools = Counter(r.pool for r in records if r.ttft is not None)
    prompt = sum(r.prompt_tokens_reported or 0 for r in records)
    cached = sum(r.cached_tokens_reported or 0 for r in records)
    return RouteRow(
        route=route,
        per_second=len(records) / span,
        budget=next((r.ttft_budget for r in reversed(records) if r.ttft_budget), None),
        p50=_quantile(ttfts, 0.5),
        p99=_quantile(ttfts, 0.99),
        attainment=sum(judged) / len(judged) if judged else None,
        tiers={pool: count / pools.total() for pool, count in pools.most_common()},
        hit=cached / prompt if prompt else None,
        shed=sum(r.end is RequestOutcome.SHED for r in records) / max(len(records), 1),
        failed=sum(
            r.end in (RequestOutcome.FAILED, RequestOutcome.UPSTREAM_BROKE, RequestOutcome.INTERNAL) for r in records
        ),
    )


def _quantile(ordered: list[float], q: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


COLUMNS = ("route", "req/s", "budget", "TTFT p50", "p99", "met", "answered by", "hit", "shed", "failed")


def render(found: list[RouteRow], title: str) -> Table:
    return text_table(COLUMNS, map(_cells, found), title=title, wrapped="answered by")


def _cells(row: RouteRow) -> tuple[str, ...]:
    return (
        row.route,
        f"{row.per_second:.1f}",
        _ms(row.budget),
        _ms(row.p50),
        _ms(row.p99),
        _share(row.attainment),
        "  ".join(f"{pool} {share:.0%}" for pool, share in row.tiers.items()),
        _share(row.hit),
        f"{row.shed:.0%}",
        str(row.failed),
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
