"""`firsttoken replay --live`: recorded traffic against real sockets; output, errors and exit codes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.live.probe import random_text
from gateway.cli.main import main
from gateway.observe.record import Record
from lab.commands import add_commands
from tests.support.builders import calling, post
from tests.support.gateways import running
from tests.support.scripted_fleet import dead_url
from tests.support.simulated import engine_pool, engines, eventually

ROOT = Path(__file__).parents[3]
KEY = "sk-canary-0123456789abcdef"
POOLS = "pools: {p: {backend: vllm, model: m, endpoints: [http://a]}}\n"
ROUTES = "routes: {chat: {tiers: [p], ttft: {budget: 2s}}}\n"
VIRTUAL = "belongs to a replay in virtual time: leave it out, or leave --live out"


def write_trace(count: int = 12, pause: float = 0.04, **more: Any) -> None:
    """Prompts of two sessions, of 1,024 common tokens each, on the route `chat`. `pause`: s between two."""
    rows = [
        {"timestamp": number * pause * 1e3, "input_length": 1_100, "output_length": 2, "route": "chat"}
        | {"hash_ids": [number % 2 * 10, number % 2 * 10 + 1], **more}
        for number in range(count)
    ]
    Path("trace.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("routes.yaml").write_text(POOLS + ROUTES)
    write_trace()


class LiveReplay:
    """One run of the command, in a thread."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self.trace = str(folder / "trace.jsonl")
        self.out = self.err = ""

    async def run(self, url: str, *options: str, trace: str = "") -> int:
        code = await asyncio.to_thread(main, ["replay", "--live", url, trace or self.trace, *options], [add_commands])
        self.out, self.err = self._capsys.readouterr()
        return code

    @property
    def error(self) -> str:
        """The only line beside the announcement."""
        [line] = [line for line in self.err.splitlines() if not line.startswith("live: ")]
        return line


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> LiveReplay:
    return LiveReplay(capsys, tmp_path)


async def test_a_gateway_is_played_with_the_budgets_of_a_configuration(command: LiveReplay) -> None:
    """Its own kind of address: a key, and the route as the model. A table and bars."""
    keys = [{"name": "me", "sha256": sha256(KEY.encode()).hexdigest()}]
    async with engines(1, speed=8.0) as servers, running({"main": engine_pool(*servers)}, keys=keys) as gateway:
        code = await command.run(f"{gateway.url}/v1", "--config", "routes.yaml", "--key", KEY, "--speed", "2")
    lines = command.out.splitlines()
    assert (code, command.err) == (
        0,
        f"live: 12 requests to {gateway.url}/v1 over 200ms, with 13,200 prompt tokens and at most 24 tokens of output"
        "\n",
    )
    assert lines[1].split()[:7] == ["chat", "12", "2s", "100.0%", "75.7%", "to", "100.0%"]
    assert lines[3] == f"chat  {'█' * 30}{'▒' * 10} 100.0%"
    assert KEY not in command.out + command.err


async def test_prompts_share_what_the_recorded_ones_shared(command: LiveReplay) -> None:
    """Twelve prompts of two beginnings: the engine computes each beginning once. No key, another model's name."""
    async with engines(1, speed=8.0) as [engine]:
        assert await command.run(engine.url, "--ttft", "2s", "--model", "served", "--json", "--speed", "0.5") == 0
        hits, queries = engine.engine.prefix_hits, engine.engine.prefix_queries
        assert "authorization" not in engine.requests[0].headers
    [row] = json.loads(command.out)
    assert (row["route"], row["sent"], row["met"], row["failures"]) == ("chat", 12, 12, {})
    assert queries == pytest.approx(12 * 1_100, rel=0.05)
    assert hits == pytest.approx(10 * 1_024, rel=0.05)


async def test_the_access_log_of_a_gateway_is_playable(command: LiveReplay, tmp_path: Path) -> None:
    """Lengths and shared prefixes come back, of a log that holds no text."""
    log, begin = tmp_path / "access.log", random_text(2_000)
    state: dict[str, Any] = {"telemetry": {"access_log": str(log)}}
    async with (
        engines(1, speed=20.0) as servers,
        running({"main": engine_pool(*servers)}, **state) as gateway,
        calling(gateway.url) as caller,
    ):
        for _ in range(2):
            content = f"{begin} {random_text(100)}"
            asked = {"model": "chat", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
            assert (await caller.whole(post(asked)))[0] == 200
        await eventually(lambda: log.exists() and log.read_bytes().count(b"\n") == 2)
    lengths = [json.loads(line)["prompt_tokens_reported"] for line in log.read_text().splitlines()]
    records: list[Record] = []
    async with engines(1, speed=20.0) as servers, running({"main": engine_pool(*servers)}) as gateway:
        gateway.recorder.sinks.append(records.append)
        assert await command.run(gateway.url, "--ttft", "5s", trace=str(log)) == 0
    assert [record.answer.prompt_tokens for record in records] == pytest.approx(lengths, rel=0.02)
    assert (records[1].answer.cached_tokens or 0) > 0.7 * lengths[1]


async def test_an_interrupted_replay_reports_what_it_has() -> None:
    """SIGINT with the second request, a second after the first: exit code 0, and the table of the requests so far."""
    write_trace(count=9, pause=1.0)
    async with engines() as [engine]:
        options = ("--live", engine.url, "trace.jsonl", "--ttft", "2s", "--model", "served")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lab", "replay", *options),
            env={"PYTHONPATH": str(ROOT)},
            stdout=PIPE,
            stderr=PIPE,
        )
        await eventually(lambda: len(engine.requests) == 2)
        process.send_signal(signal.SIGINT)
        out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    route, sent, budget, share = out.decode().splitlines()[1].split()[:4]
    assert (route, budget, share) == ("chat", "2s", "100.0%")
    assert 1 <= int(sent) < 9


# --------------------------------------------------------------------------- errors


async def test_a_refused_connection_is_one_line(command: LiveReplay) -> None:
    url = dead_url()
    assert await command.run(url, "--ttft", "1s") == 2
    assert command.error == f"firsttoken: {url}: connection refused; start the server, or correct the port"


async def test_a_missing_and_a_refused_key_are_one_line_each(
    command: LiveReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each names the option; the refused key is not printed."""
    keys = [{"name": "me", "sha256": sha256(KEY.encode()).hexdigest()}]
    async with engines() as servers, running({"main": engine_pool(*servers)}, keys=keys) as gateway:
        assert await command.run(gateway.url, "--ttft", "1s") == 2
        assert command.error.startswith(f"firsttoken: {gateway.url}: wants the key: 401 ")
        assert command.error.endswith("; add --key KEY, or --key-env NAME")
        monkeypatch.setenv("WRONG", "sk-wrong-0123456789")
        assert await command.run(gateway.url, "--ttft", "1s", "--key-env", "WRONG") == 2
        assert command.error.endswith("; correct the key")
        assert "sk-wrong" not in command.err


async def test_an_unknown_model_is_one_line(command: LiveReplay) -> None:
    async with engines() as [engine]:
        assert await command.run(engine.url, "--ttft", "1s") == 2
    assert command.error.endswith("; correct the model (MODEL=TRACE, or --model NAME) or the path of the URL")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no budget: add --ttft TIME, such as 800ms, or --config FILE with the routes"),
        (["--ttft", "1"], "--ttft 1: '1' has no unit of time; write it like 250ms, 2s or 5m"),
        (["--ttft", "0s"], "--ttft 0s: must be above 0"),
        (
            ["--ttft", "1s", "--closed"],
            f"--closed {VIRTUAL}",
        ),
        (
            ["--ttft", "1s", "--load", "2"],
            f"--load {VIRTUAL}",
        ),
        (["--ttft", "1s", "--key-env", "NOT_SET"], "--key-env NOT_SET: the variable is not set"),
        (["--config", "routes.yaml", "--limit", "0"], "{trace}: no usable request; each line needs its prompt"),
    ],
)
async def test_wrong_options_are_one_line(command: LiveReplay, options: list[str], message: str) -> None:
    assert await command.run("http://127.0.0.1:1", *options) == 2
    assert command.error.startswith(f"firsttoken: {message.format(trace=command.trace)}")


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://me:secret@a", "http://a/b?c=d", "http://[::1"])
async def test_a_wrong_url_is_one_line(command: LiveReplay, url: str) -> None:
    """Without the password in it."""
    assert await command.run(url, "--ttft", "1s") == 2
    assert command.error.startswith("firsttoken: --live")
    assert "secret" not in command.err


async def test_a_trace_without_models_needs_one(command: LiveReplay) -> None:
    write_trace(route="")
    assert await command.run("http://127.0.0.1:1", "--ttft", "1s") == 2
    assert command.error == "firsttoken: the trace names no model: write MODEL=TRACE, or add --model NAME"


async def test_an_absurd_prompt_is_refused(command: LiveReplay) -> None:
    write_trace(input_length=10**7, hash_ids=[])
    assert await command.run("http://127.0.0.1:1", "--ttft", "1s") == 2
    assert command.error == "firsttoken: a prompt of 10,000,000 tokens: at most 1,000,000 can be sent"


def test_options_of_live_need_live(capsys: pytest.CaptureFixture[str]) -> None:
    """In virtual time they would have no effect."""
    code = main(["replay", "trace.jsonl", "--config", "routes.yaml", "--speed", "2"], [add_commands])
    assert (code, capsys.readouterr().err) == (2, "firsttoken: --speed belongs to --live: add --live URL\n")
