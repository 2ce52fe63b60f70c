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
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from time import monotonic

from rich.console import Console
from rich.live import Live

from gateway.app import Gateway
from gateway.cli.top_tables import text_table
from gateway.config.models import Config
from gateway.observe.record import Record, RequestOutcome
from gateway.process import SWITCH_INTERVAL, loop_factory, tune_gc
from lab.demo.incident_command import known_incident, play_incident
from lab.demo.scene import CALLERS, document

WINDOW = 30.0  # s of the table
WIDTH = 110  # columns, for an output without a width
COLUMNS = ("route", "req/s", "budget", "TTFT p50", "p99", "met", "answered by", "hit", "shed", "failed")
FAILED = (RequestOutcome.FAILED, RequestOutcome.UPSTREAM_BROKE, RequestOutcome.INTERNAL)
DASH = "–"

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
    """`args`: incident (None: all traffic), port, admin_port (0: any free port), seconds (None: until Ctrl-C). Raises
    ConfigError."""
    incident = None if args.incident is None else known_incident(args.incident)
    logging.getLogger("firsttoken").setLevel(logging.ERROR)  # engines and callers share this machine, which may be slow
    sys.setswitchinterval(SWITCH_INTERVAL)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if incident is not None:
            return runner.run(play_incident(incident, args.port, args.admin_port, args.seconds))
        return runner.run(_demo(args.port, args.admin_port, args.seconds))


async def _demo(port: int, admin_port: int, seconds: float | None) -> int:
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    async with _child("engines") as output:
        urls = json.loads(await output.readline())
        gateway = Gateway(Config.model_validate(document(urls, port, admin_port)))
        try:
            await gateway.start(tune_gc)
            await _watch(gateway, stop, seconds)
            return 0
        except OSError as error:
            print(f"firsttoken: cannot listen on port {port} or {admin_port}: {error.strerror}", file=sys.stderr)
            return 2
        finally:
            await gateway.stop()


async def _watch(gateway: Gateway, stop: asyncio.Event, seconds: float | None) -> None:
    """On a terminal a table in place; elsewhere a table now and then."""
    console = Console()
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    if live is None:
        console = Console(width=WIDTH)
    hello = HELLO.format(url=gateway.url, admin=gateway.admin_url, models=", ".join(gateway.config.named_routes))
    console.print(hello, highlight=False, soft_wrap=True)
    start = monotonic()
    end = float("inf") if seconds is None else start + seconds
    async with _child("callers", gateway.url):
        with live or contextlib.nullcontext():
            while not stop.is_set() and monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    pause = 10.0 if live is None else 0.5
                    await asyncio.wait_for(stop.wait(), min(pause, max(end - monotonic(), 0.01)))
                found = rows(gateway.recorder.recent, [callers.route for callers in CALLERS], monotonic(), start)
                table = text_table(COLUMNS, found, title=f"last {WINDOW:.0f} s", wrapped="answered by")
                if live is None:
                    console.print(table)
                else:
                    live.update(table, refresh=True)


@contextlib.asynccontextmanager
async def _child(*role: str) -> AsyncIterator[asyncio.StreamReader]:
    """A child in a process group of its own: Ctrl-C reaches this process only, which then ends the child.

    It imports what this process imports: with `-m` alone, a folder `lab` of the working directory would come first.
    """
    modules = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = (sys.executable, "-P", "-m", "lab.demo.scene", *role)
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True, env=modules)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield child.stdout
    finally:
        child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), 3)
        except TimeoutError:
            child.kill()
            await child.wait()


def rows(records: Iterable[Record], routes: Iterable[str], now: float, since: float) -> list[tuple[str, ...]]:
    """`since`: start of counting, so the first seconds are not divided by a whole window."""
    recent = [r for r in records if r.arrival + r.total >= now - WINDOW]
    span = max(min(WINDOW, now - since), 1.0)
    return [_row(route, [r for r in recent if r.route.name == route], span) for route in routes]


def _row(route: str, records: list[Record], span: float) -> tuple[str, ...]:
    """A cell for each of COLUMNS; a dash without any Record."""
    ttfts = sorted(r.ttft for r in records if r.ttft is not None and r.asked.stream)
    budgets = [r.budgets.ttft for r in records if r.budgets.ttft]
    judged = [r.ttft_met for r in records if r.ttft_met is not None]
    pools = Counter(r.endpoint.pool for r in records if r.ttft is not None)
    prompt = sum(r.answer.prompt_tokens or 0 for r in records)
    cached = sum(r.answer.cached_tokens or 0 for r in records)
    return (
        route,
        f"{len(records) / span:.1f}",
        _ms(budgets[-1:], 0.5),
        _ms(ttfts, 0.5),
        _ms(ttfts, 0.99),
        _share(sum(judged), len(judged)),
        "  ".join(f"{pool} {_share(count, pools.total())}" for pool, count in pools.most_common()),
        _share(cached, prompt),
        _share(sum(r.end is RequestOutcome.SHED for r in records), max(len(records), 1)),
        str(sum(r.end in FAILED for r in records)),
    )


def _ms(ordered: Sequence[float], q: float) -> str:
    """The quantile `q` of ordered seconds."""
    return f"{ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1e3:.0f} ms" if ordered else DASH


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else DASH
