"""`firsttoken why` against a gateway: the cause of a request, and of a route; also in the log, metric and /requests."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.cli.main import main
from gateway.cli.why import WIDTH, request_screen
from gateway.observe.part_notes import cause_of
from tests.support.builders import CHAT, STREAMED, calling, post
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import Pause, Upstream

STREAM = {**CHAT, "stream": True}
FAILED = b"HTTP/1.1 500 x\r\ncontent-length: 2\r\n\r\n{}"
ROUTE = {"tiers": ["api"], "ttft": {"budget": "60ms"}, "tpot": "off"}


@asynccontextmanager
async def slow_gateway(*, log: str = "off", **more: Any) -> AsyncIterator[Gateway]:
    """A gateway after two requests: one met its budget, the other failed at the endpoint."""
    async with (
        Upstream([STREAMED], [FAILED]) as api,
        running(
            {"api": pool(api.url)},
            {"chat": {**ROUTE, "ttft": {"budget": "20s"}}},
            telemetry={"access_log": log},
            **more,
        ) as gateway,
    ):
        for name in ("good", "bad"):
            async with calling(gateway.url) as caller:
                await caller.ask(post(STREAM, f"x-request-id: {name}"))
                if name == "good":
                    await caller.chunks()
        await eventually(lambda: len(gateway.recorder.recent) == 2)
        yield gateway


async def why(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["why", *arguments], [])


async def test_a_failed_request_is_explained_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """Attempt with status, evidence, mend; 80 columns at most. A request that met its budgets has no cause."""
    async with slow_gateway() as gateway:
        assert await why("bad", "--admin", gateway.admin_url) == 0
        bad = capsys.readouterr().out
        assert await why("good", "--admin", gateway.admin_url) == 0
        good = capsys.readouterr().out
    assert "cause  endpoint_failed" in bad
    assert "500" in bad
    assert "mend   " in bad
    assert max(map(len, bad.splitlines())) <= WIDTH
    assert "cause  none: the request met its budgets" in good


async def test_a_route_is_explained_by_cause_against_the_window_before(capsys: pytest.CaptureFixture[str]) -> None:
    async with slow_gateway() as gateway:
        assert await why("--route", "chat", "--last", "5m", "--admin", gateway.admin_url) == 0
        told = capsys.readouterr().out
        assert await why("--route", "caht", "--admin", gateway.admin_url) == 2
        assert "did you mean 'chat'?" in capsys.readouterr().err
    assert "1 of 2 requests missed a budget or failed" in told
    assert any(line.split()[:2] == ["endpoint_failed", "1"] for line in told.splitlines())
    assert "the 5 min before: 0 of 0" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "name a REQUEST_ID, or --route"),
        (["one", "--route", "chat"], "name a REQUEST_ID, or --route"),
        (["gone"], "no recent request has the id gone"),
        (["--route", "chat", "--last", "2h"], "'2h' is not a time from 1m to 60m"),
    ],
)
async def test_a_wrong_question_is_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    async with slow_gateway() as gateway:
        assert await why(*arguments, "--admin", gateway.admin_url) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


async def test_the_cause_is_in_the_log_and_the_metric(tmp_path: Path) -> None:
    """The log has the word alone; evidence and mend are at /requests."""
    log = tmp_path / "log"
    async with slow_gateway(log=str(log)) as gateway:
        read = gateway.admin.registry.get_sample_value
        labels = {"route": "chat", "cause": "endpoint_failed"}
        assert read("firsttoken_slow_total", labels) == 1.0
    lines = {line["request_id"]: line for line in map(json.loads, log.read_text().splitlines())}
    assert (lines["good"]["cause"], lines["bad"]["cause"]) == ("", "endpoint_failed")
    assert all("why" not in line for line in lines.values())


async def test_a_late_first_token_is_explained_while_the_usual_is_not_known_yet() -> None:
    """Nothing was computed, nobody was ahead: without evidence there is no claim."""
    async with Upstream([Pause(0.3), STREAMED]) as api, running({"api": pool(api.url)}, {"chat": ROUTE}) as gateway:
        async with calling(gateway.url) as caller:
            await caller.ask(post(STREAM))
            await caller.chunks()
        await eventually(lambda: gateway.recorder.recent)
        record = gateway.recorder.recent[-1]
    assert record.ttft_met is False
    assert cause_of(record) == "unknown"


def test_a_servers_message_gives_no_command_to_the_terminal() -> None:
    attempt = {"number": 1, "kind": "primary", "endpoint": "p/a", "opened_ms": 0, "ended_ms": 1, "ending": "failed"}
    shown: dict[str, Any] = dict.fromkeys(
        ("ttft_ms", "ttft_budget_ms", "ttft_predicted_p50_ms", "prompt_tokens_reported", "prompt_tokens_estimated")
    )
    shown |= {"request_id": "one", "wall": 0.0, "route": "chat", "tenant": "-", "end": "failed", "status": 502}
    attempts = [{**attempt, "status": 500, "cause": "\x9b31mred\x1b[0m"}]
    text = request_screen({**shown, "endpoint": "p/a", "stages_ms": {}, "attempts": attempts})
    assert all(line.isprintable() for line in text.splitlines())
    assert "?31mred" in text


async def test_records_on_disk_explain_a_request_after_the_gateway(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same screens as from the gateway; an unknown id and an empty directory are errors."""
    async with slow_gateway(records={"dir": str(tmp_path)}) as gateway:
        from_gateway = []
        for asked in (["bad"], ["good"], ["--route", "chat", "--last", "15m"]):
            assert await why(*asked, "--admin", gateway.admin_url) == 0
            from_gateway.append(capsys.readouterr().out)
    for asked, screen in zip((["bad"], ["good"], ["--route", "chat", "--last", "15m"]), from_gateway, strict=True):
        assert await why(*asked, "--records", str(tmp_path)) == 0
        assert capsys.readouterr().out == screen
    assert await why("other", "--records", str(tmp_path)) == 2
    assert "no request has the id other" in capsys.readouterr().err
    assert await why("bad", "--records", str(tmp_path / "none")) == 2
    assert "name the directory of `records.dir`" in capsys.readouterr().err


async def test_stored_records_are_printed_as_lines_of_the_access_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that an access log has, and `why` of slow requests; those of a time, a route, or slow ones alone."""
    log, kept = tmp_path / "access.jsonl", tmp_path / "records"
    async with slow_gateway(log=str(log), records={"dir": str(kept)}):
        pass
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    choices: list[tuple[list[str], list[Any]]] = [([], lines), (["--slow"], lines[1:]), (["--route", "batch"], [])]
    for asked, expected in (*choices, (["--last", "1h"], lines)):
        assert await asyncio.to_thread(main, ["records", str(kept), *asked], []) == 0
        printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [{name: value for name, value in row.items() if name != "why"} for row in printed] == expected
    with sqlite3.connect(kept / "records-0.sqlite") as db:
        db.execute("UPDATE records SET at = at - 7200")
    assert await asyncio.to_thread(main, ["records", str(kept), "--last", "1h"], []) == 0
    assert capsys.readouterr().out == ""
