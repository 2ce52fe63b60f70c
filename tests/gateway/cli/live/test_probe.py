"""`firsttoken probe`: measured over real sockets, saved, and used by the gateway and by `check`."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from backends.server_profiles import PROFILES
from gateway.cli.live import probe
from gateway.cli.live.probe import WORDS, random_text
from gateway.cli.main import main
from gateway.config.config_errors import ConfigError
from gateway.config.models import Config
from gateway.observe.record import Record
from gateway.tokenize.tokenizers import encoder
from policies.latency.answer_lengths import KNOWN_ANSWERS, AnswerLengths
from tests.support.builders import CHAT, DONE, FINISH, STREAMED, TOKEN, USAGE, calling, post
from tests.support.gateways import document, running
from tests.support.simulated import engine_pool, engines
from tests.support.upstream import HANG, LAST_CHUNK, STREAM_HEAD, Received, Script, Upstream, chunk, reply

ROUTES = {"chat": {"tiers": ["own"], "ttft": {"budget": "20s"}}}
SMALL = 2_000  # context window that holds the prompts of 100 and of 1,000 tokens


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "OUTPUT", 3)


def write(name: str, pools: dict[str, Any], routes: Any = ROUTES, **more: Any) -> None:
    Path(name).write_text(yaml.safe_dump(document(pools, routes, **more)))


class ProbeCommand:
    """One run of a command, in a thread."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    async def run(self, command: str, *options: str) -> int:
        code = await asyncio.to_thread(main, [command, *options])
        self.out, self.err = self._capsys.readouterr()
        return code

    async def probe(self, pool: dict[str, Any], *options: str, **more: Any) -> int:
        """Of a pool named `own`, with `more` in the configuration."""
        write("f.yaml", {"own": pool}, **more)
        return await self.run("probe", "own", "--config", "f.yaml", *options)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> ProbeCommand:
    return ProbeCommand(capsys)


async def first_record(pool: dict[str, Any], **more: Any) -> Record:
    """Of the first request to a gateway: a prompt of 1,000 tokens."""
    records: list[Record] = []
    async with running({"own": pool}, ROUTES, **more) as gateway:
        gateway.recorder.sinks.append(records.append)
        async with calling(gateway.url) as caller:
            messages = [{"role": "user", "content": random_text(1_000)}]
            await caller.ask(post({**CHAT, "messages": messages, "stream": True, "max_tokens": 2}, "connection: close"))
            await caller.rest()
    return records[0]


async def test_the_first_forecast_of_a_gateway_comes_from_the_profile(command: ProbeCommand, tmp_path: Path) -> None:
    """Of an engine several times slower than the one that a cold gateway assumes."""
    state = {"state": {"dir": str(tmp_path / "state")}}
    async with engines(1, "8b-l4") as only:
        pool = engine_pool(*only, context_window=SMALL)
        cold = await first_record(pool)
        assert await command.probe(pool, **state) == 0
        known = await first_record(pool, **state)
    measured = float(re.findall(r"1k alone +█+ ([0-9.]+)ms", command.out)[0]) / 1e3
    assert cold.placed.ttft_p50 is not None
    assert known.placed.ttft_p50 == pytest.approx(measured, rel=0.5)  # of single answers in real time
    assert cold.placed.ttft_p50 < measured / 2


async def test_what_is_known_of_other_pools_is_kept(command: ProbeCommand, tmp_path: Path) -> None:
    """And a pool that is measured again has more samples."""
    state = {"state": {"dir": str(tmp_path / "state")}}
    async with engines(2, speed=8.0) as [one, two]:
        pools = {name: engine_pool(engine, context_window=500) for name, engine in (("own", one), ("other", two))}
        write("f.yaml", pools, **state)
        for pool in ("own", "other", "own"):
            assert await command.run("probe", pool, "--config", "f.yaml") == 0
    saved = json.loads((tmp_path / "state" / "learned.json").read_bytes())["endpoints"]
    samples = {name.partition("/")[0]: found["engine"]["samples"] for name, found in saved.items()}
    assert samples == {"own": 14, "other": 7}


async def test_a_host_name_is_measured_at_each_of_its_addresses(command: ProbeCommand, tmp_path: Path) -> None:
    """As a gateway that resolves the name knows them."""
    state = {"state": {"dir": str(tmp_path / "state")}}
    async with engines(1, speed=8.0) as [engine]:
        named = {"url": f"http://localhost:{engine.port}", "resolve": "10s"}
        pool = engine_pool(engine, endpoints=[named], context_window=500)
        assert await command.probe(pool, **state) == 0
        async with running({"own": pool}, ROUTES) as gateway:
            known = {*gateway.runtime.current.upstreams}
    assert known == json.loads((tmp_path / "state" / "learned.json").read_bytes())["endpoints"].keys()


async def test_a_budget_below_the_known_idle_ttft_is_an_error_of_check(command: ProbeCommand, tmp_path: Path) -> None:
    """Exit code 2; one line names the route, the budget, the endpoint, the time and the mend."""
    state = {"state": {"dir": str(tmp_path / "state")}}
    async with engines(1) as [engine]:
        pool = engine_pool(engine, context_window=SMALL)
        short = {"chat": {"tiers": ["own"], "ttft": {"budget": "5ms"}}}
        write("short.yaml", {"own": pool}, short, **state)
        assert await command.run("check", "short.yaml") == 0  # nothing is known yet
        assert await command.probe(pool, **state) == 0
        assert await command.run("check", "short.yaml") == 2
        expected = (
            rf"fault: routes\.chat\.ttft\.budget is 5ms, and its best endpoint, own/127\.0\.0\.1:{engine.port}, has"
            r" needed \d+ms idle; raise it to \d+ms, or add a faster pool\n"
        )
        assert re.fullmatch(expected, command.err)
        assert await command.run("check", "f.yaml") == 0  # 20 s


async def test_promises_that_no_tier_keeps_are_notes_of_check(command: ProbeCommand, tmp_path: Path) -> None:
    """By the pace that was learned and the usual length of the route's answers; a note is no fault."""
    state = {"state": {"dir": str(tmp_path / "state")}}
    budgets = {"tpot": {"budget": "1ms"}, "total": {"budget": "20s"}}
    async with engines(1) as [engine]:
        pool = engine_pool(engine, context_window=SMALL)
        write("lost.yaml", {"own": pool}, {"chat": {**ROUTES["chat"], **budgets}}, **state)
        assert await command.probe(pool, **state) == 0
        learned, lengths = tmp_path / "state" / "learned.json", AnswerLengths()
        for _ in range(2 * KNOWN_ANSWERS):
            lengths.observe_output("chat", 100_000)
        saved = json.loads(learned.read_bytes())
        learned.write_bytes(msgspec.json.encode({**saved, "lengths": lengths.learned()}))
        assert await command.run("check", "lost.yaml") == 0
    own = rf"own/127\.0\.0\.1:{engine.port}"
    notes = (
        rf"note: no tier keeps the tpot of route chat: the fastest endpoint, {own}, has needed [0-9.]+ms per token, and"
        r" the budget is 1ms\n"
        r"note: no tier keeps the total of route chat: half of its answers have more than \d+ tokens, which take"
        rf" [0-9.]+\w+ at {own}, the soonest, and the budget is 20s\n"
    )
    assert re.search(notes, command.out)


async def test_a_route_with_an_unknown_pool_may_be_faster(command: ProbeCommand, tmp_path: Path) -> None:
    """No error: nobody has measured the other pool."""
    state = {"state": {"dir": str(tmp_path / "state")}}
    async with engines(1) as only:
        pool = engine_pool(*only, context_window=SMALL)
        assert await command.probe(pool, **state) == 0
        routes = {"chat": {"tiers": ["own", "new"], "ttft": {"budget": "5ms"}}}
        write("both.yaml", {"own": pool, "new": {**pool, "endpoints": ["http://new"]}}, routes, **state)
        assert (await command.run("check", "both.yaml"), command.err) == (0, "")


async def test_every_size_that_fits_is_measured_alone_and_at_once(command: ProbeCommand, tmp_path: Path) -> None:
    """Bounded output, no prompt twice, each unknown to the engine's cache; a table and bars."""
    async with engines(1, speed=8.0) as [engine]:
        assert await command.probe(engine_pool(engine, context_window=9_000)) == 0
        bodies = [request.body for request in engine.requests]
    found = [line.split() for line in command.out.splitlines() if line.startswith("own/")]
    sizes = [(cells[1], " ".join(cells[3:-3])) for cells in found]
    assert sizes == [(size, name) for size in ("100", "1k", "8k") for name in ("alone", "4 at once")]
    assert all(
        int(cells[2]) == pytest.approx(meant, rel=0.2) for cells, meant in zip(found[4:], [8_000] * 2, strict=True)
    )
    prompts = [body["messages"][0]["content"] for body in bodies[1:]]
    assert (len(prompts), len(set(prompts))) == (21, 21)
    assert max(body["max_tokens"] for body in bodies) == 3
    assert "not saved: the configuration has no directory for it; add state: {dir: DIR}" in command.out


@pytest.mark.parametrize("name", ["o200k_base", "cl100k_base"])
def test_a_word_of_a_random_text_is_a_token(name: str) -> None:
    """So that a prompt has the size that was meant."""
    assert [word for word in WORDS if encoder(name).count(f" {word}") != 1] == []
    assert random_text(20) != random_text(20)


# --------------------------------------------------------------------------- costs


async def test_an_api_is_asked_only_where_somebody_agreed(command: ProbeCommand) -> None:
    """The price is said first, and nothing is sent; not even for the list of models."""
    async with Upstream([reply()]) as server:
        api = {"backend": "compatible", "model": "m", "endpoints": [server.url], "price": {"input": 10, "output": 10}}
        assert await command.probe({**api, "context_window": SMALL}) == 2
        assert command.err == "firsttoken: nothing was sent: add --tokens to agree to the price\n"
        assert await command.probe({**api, "context_window": SMALL}, "--no-tokens") == 0
        assert (server.requests, command.err) == ([], "")
    tokens = 7 * (100 + 64 + 3 + 1_000 + 64 + 3) + 17
    assert f"3 alone and 4 at once: {tokens * 10 / 1e6:.6f} USD at most, by the price of the pool\n" in command.out


@pytest.mark.parametrize("answer", ["y\n", "\n", ""])
def test_an_answer_on_the_terminal_agrees(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Only yes: an end of the input is none."""
    config = Config.model_validate(
        document({"own": {"backend": "compatible", "model": "m", "endpoints": ["http://a"]}})
    )
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", lambda: answer)
    with (
        nullcontext() if answer.startswith("y") else pytest.raises(ConfigError, match=r"^firsttoken: nothing was sent$")
    ):
        probe.agree(config, "own", None)


async def test_a_server_that_counts_too_little_gets_no_longer_prompts(command: ProbeCommand) -> None:
    """Such as one that reports uncached tokens alone: what is sent is what was announced."""
    counted = [STREAM_HEAD + b"".join(map(chunk, (TOKEN, FINISH, USAGE, DONE))) + LAST_CHUNK]
    async with Upstream(counted) as server:
        pool = {"backend": "compatible", "model": "m", "endpoints": [server.url], "context_window": SMALL}
        assert await command.probe(pool, "--tokens") == 0
    words = [len(json.loads(each.body)["messages"][0]["content"].split()) for each in server.requests if each.body]
    assert max(words) <= 1_000 + len(probe.LAST_LINE.split())


# --------------------------------------------------------------------------- faults


async def test_an_unknown_pool_is_named(command: ProbeCommand) -> None:
    write("f.yaml", {"own": engine_pool(endpoints=["http://a"])})
    assert await command.run("probe", "onw", "--config", "f.yaml") == 2
    assert command.err == "firsttoken: no pool 'onw'; did you mean 'own'?\n"


async def test_a_dead_endpoint_does_not_keep_the_other_from_being_measured(command: ProbeCommand) -> None:
    async with engines(1, speed=8.0) as [engine]:
        pool = engine_pool(engine, endpoints=["http://127.0.0.1:1", engine.url], context_window=500)
        assert await command.probe(pool) == 2
    assert command.err == (
        "fault: own/127.0.0.1:1 (http://127.0.0.1:1): connection refused; start the server, or correct the port\n"
    )
    assert f"own/127.0.0.1:{engine.port}  " in command.out


class HangsAtLong(Upstream):
    """Answers short prompts, and hangs at those of 1,000 tokens."""

    def script(self, received: Received) -> Script:
        return [HANG] if len(received.body) > 3_000 else [STREAMED]


async def test_a_failure_ends_the_measurement_of_its_endpoint(command: ProbeCommand) -> None:
    """Longer prompts are not sent, and the next endpoint is measured."""
    async with engines(1, speed=8.0) as [engine], HangsAtLong() as server:
        pool = engine_pool(engine, backend="compatible", endpoints=[server.url, engine.url], context_window=SMALL)
        assert await command.probe(pool, "--tokens", "--timeout", "3") == 0
    assert f"own/{server.url[7:]}, 1k alone: no token within 3 s" in command.out
    assert sum(len(received.body) > 3_000 for received in server.requests) == 1
    assert f"own/127.0.0.1:{engine.port} 1k 4 at once" in command.out


async def test_a_window_that_the_server_knows_alone_is_respected(
    command: ProbeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt that it refuses ends the measurement; what was measured is reported, with exit code 0."""
    monkeypatch.setitem(PROFILES, "short", replace(PROFILES["8b-h100"], max_model_len=SMALL))
    async with engines(1, "short", speed=8.0) as [engine]:
        assert await command.probe(engine_pool(engine)) == 0
    assert f"own/127.0.0.1:{engine.port}, 8k alone: does not fit its context window" in command.out


async def test_a_directory_that_cannot_be_written_is_a_fault(command: ProbeCommand, tmp_path: Path) -> None:
    """The measurement is shown all the same."""
    (tmp_path / "file").write_text("")
    async with engines(1, speed=8.0) as [engine]:
        pool = engine_pool(engine, context_window=500)
        assert await command.probe(pool, state={"dir": str(tmp_path / "file" / "state")}) == 2
    assert f"the profile was not saved in {tmp_path}/file/state; make the directory writable" in command.err
    assert "100 alone" in command.out
