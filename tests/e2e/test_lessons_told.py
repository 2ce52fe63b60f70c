"""Lessons of a running gateway, as `firsttoken facts show --admin` and `firsttoken explain --admin` tell them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from gateway.cli.main import main
from tests.support.refusing_server import Verifying, ask, no_temperature, served


async def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert await asyncio.to_thread(main, [*map(str, arguments)], []) == 0
    return capsys.readouterr().out


async def test_lessons_are_told_beside_the_rows_and_of_a_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By pool and model: for whom, and until when. Another model, or another pool, has none."""
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hi"}]}))
    async with Verifying(no_temperature) as server, served(("anthropic", server)) as (gateway, caller):
        model, show = gateway.config.pools["p0"].model, ("facts", "show")
        assert "learned" not in await run(capsys, "explain", request, "--admin", gateway.admin_url)
        assert (await ask(caller, temperature=0.5))[0] == 200
        told = await run(capsys, *show, f"vendor/{model}", "--admin", gateway.admin_url)
        [line] = [line for line in told.splitlines() if line.startswith("p0 ")]
        assert re.split("  +", line)[:4] == ["p0", "/v1/messages", "temperature is left out", "1 of the callers"]
        assert line.endswith(" UTC")
        assert told.index(f"{model} at ") < told.index("learned by")
        assert "has learned nothing of other" in await run(capsys, *show, "other", "--admin", gateway.admin_url)
        explained = await run(capsys, "explain", request, "--admin", gateway.admin_url)
        assert "learned by refusals\n   p0: temperature is left out, for 1 of the callers, for " in explained


async def test_an_address_that_is_no_gateway_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """With nothing printed before it."""
    code = await asyncio.to_thread(main, ["facts", "show", "m", "--admin", "http://127.0.0.1:1"], [])
    said = capsys.readouterr()
    assert (code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "this is not the admin port of a running gateway" in said.err
