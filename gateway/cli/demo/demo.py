"""`firsttoken demo`: engines, gateway, callers and a live table in one command, without further programs.

The gateway runs in this process; engines and callers run in one child process each, outside the gateway's event loop.
A
child ends with its standard input, so no process is left behind.
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
from time import monotonic

from rich.console import Console
from rich.live import Live

from gateway.app import Gateway
from gateway.cli.demo import live_table as table
from gateway.cli.demo.scene import CALLERS, document
from gateway.config.models import Config
from gateway.process import SWITCH_INTERVAL, loop_factory, tune_gc

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
    console, stop = _console(), asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    engines = await _child("gateway.cli.demo.demo_engines")
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
        callers = await _child("gateway.cli.demo.demo_traffic", f"{gateway.url}/v1")
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


def _console() -> Console:
    """A pipe has no width; the table needs this much."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


async def _watch(gateway: Gateway, console: Console, stop: asyncio.Event, seconds: float | None) -> None:
    """On a terminal a table in place; elsewhere a table now and then."""
    start = monotonic()
    ends = start + seconds if seconds is not None else float("inf")
    live = console.is_terminal
    every = 0.5 if live else 10.0
    with Live(console=console, auto_refresh=False) if live else _Plain(console) as screen:
        while not stop.is_set() and monotonic() < ends:
            pause = min(every, max(ends - monotonic(), 0.01))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)
            now = monotonic()
            found = table.rows(gateway.recorder.recent, [c.route for c in CALLERS], now, start)
            screen.update(table.render(found, f"last {table.WINDOW:.0f} s"), refresh=True)


class _Plain:
    """Stands in for a live display where the output is not a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, renderable: object, *, refresh: bool) -> None:
        self.console.print(renderable)


async def _child(module: str, *args: str) -> Process:
    """A child in a process group of its own: Ctrl-C reaches this process only, which then ends the child."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *args, stdin=PIPE, stdout=PIPE, start_new_session=True
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
