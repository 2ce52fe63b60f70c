"""The commands of the runbooks of alerts, followed against a gateway."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

import pytest

from gateway.cli.main import main
from tests.support.builders import CHAT, calling, post
from tests.support.dashboards import DASHBOARDS, panels
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines, eventually

PAGE = (Path(__file__).parents[2] / "docs" / "trouble.md").read_text("utf-8")
NEW = [
    *("FirsttokenGoodputLow", "FirsttokenTpotMissed", "FirsttokenShedShare"),
    *("FirsttokenHitRateFell", "FirsttokenPromptsGrew", "FirsttokenApiShare"),
]
EXPECTED = {"why": "requests missed a budget or failed", "top": "goodput"}


def runbook(alert: str) -> str:
    (section,) = re.findall(rf"^### {alert}\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE)
    return str(section)


@pytest.mark.parametrize("alert", NEW)
async def test_the_commands_of_a_runbook_answer(alert: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command of the section is run as written, for a route that misses its budget."""
    commands = re.findall(r"`firsttoken ([^`]+)`", runbook(alert))
    assert commands
    routes = {"chat": {"tiers": ["only"], "ttft": {"budget": "1us"}}}
    async with engines(1) as one, running({"only": engine_pool(*one)}, routes) as gateway:
        async with calling(gateway.url) as caller:
            await caller.ask(post({**CHAT, "stream": True, "max_tokens": 3}))
            await caller.chunks()
        await eventually(lambda: gateway.recorder.live == 0)
        for command in commands:
            words = [*shlex.split(command.replace("ROUTE", "chat")), "--admin", gateway.admin_url]
            assert await asyncio.to_thread(main, words) == 0, command
            assert EXPECTED[words[0]] in capsys.readouterr().out


@pytest.mark.parametrize("alert", NEW)
def test_the_panels_that_a_runbook_names_exist(alert: str) -> None:
    """`Why, name of the panel:` leads to a panel of the dashboard."""
    titles = {panel["title"].lower() for panel in panels(DASHBOARDS["why"])}
    assert {name.lower() for name in re.findall(r"^\d\. Why, ([^:]+):", runbook(alert), re.MULTILINE)} <= titles
