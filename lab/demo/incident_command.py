"""`firsttoken demo --incident NAME`: plays an incident in real time, and shows what the gateway says of it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time

from rich.console import Console
from rich.text import Text

from gateway.admin.admin_views import request_view
from gateway.cli.why import request_screen
from gateway.config.config_errors import ConfigError, did_you_mean
from lab.demo.incident_stage import IncidentStage, incident_stage
from lab.demo.incidents import INCIDENTS


def known_incident(name: str) -> str:
    """The name. Raises ConfigError where no incident has it."""
    if name not in INCIDENTS:
        raise ConfigError([f"firsttoken: no incident '{name}'{did_you_mean(name, INCIDENTS)} ({', '.join(INCIDENTS)})"])
    return name


async def play_incident(name: str, port: int, admin_port: int, seconds: float | None) -> int:
    """Serves on after the incident, until a signal or for `seconds`, so that the gateway can be asked."""
    stop, incident = asyncio.Event(), INCIDENTS[name]
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    console = Console()
    try:
        async with incident_stage(incident.fleet, 0, time.sleep, port, admin_port) as stage:
            console.print(Text(f"{name}: calm traffic for some seconds, then the incident"))
            playing = asyncio.create_task(incident.play(stage))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((playing, stopping), return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
                return 0
            playing.result()
            await _show(stage, console)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping, seconds)
            return 0
    except OSError as error:
        print(f"firsttoken: cannot listen on port {port} or {admin_port}: {error.strerror}", file=sys.stderr)
        return 2


async def _show(stage: IncidentStage, console: Console) -> None:
    """The last request that the incident has slowed, as `firsttoken why` shows it."""
    record = await stage.record(stage.victims[-1]) if stage.victims else None
    if record is None:
        console.print(Text("no request was slow this time"))
        return
    admin = stage.gateway.admin_url
    console.print(Text("\n" + request_screen(request_view(record)) + "\n"), soft_wrap=True)
    console.print(Text(f"firsttoken why --admin {admin} {record.request_id}"), soft_wrap=True)
    console.print(Text(f"firsttoken why --admin {admin} --route chat --last 1m"), soft_wrap=True)
    console.print(Text(f"page  {admin}/dashboard   Ctrl-C ends it."), soft_wrap=True)
