"""`firsttoken up` and `firsttoken serve` without a file, as a user types them: one command, real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import shlex
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gateway.cli.up.up import greeting_of
from gateway.config.loading import load
from gateway.config.models import Config
from tests.support.local_servers import http_server, ollama
from tests.support.served import ROOT, Served, read_line
from tests.support.simulated import engines

COMMAND = (sys.executable, "-m", "gateway.cli")
FREE_PORTS = ("--port", "0", "--admin-port", "0")
KEYS = {"OPENAI_API_KEY": "sk-0123456789abcdef", "GROQ_API_KEY": "gsk_0123456789abcdef"}
HELLO = [{"role": "user", "content": "hello"}]


def environment(**more: str) -> dict[str, str]:
    """That of the tests without keys and URLs of providers."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_BASE_URL", "_HOST"))}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


@asynccontextmanager
async def started(cwd: Path, environ: Mapping[str, str], *arguments: str, **more: Any) -> AsyncIterator[Served]:
    """The command, from its first line to the line that names its ports."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, cwd=cwd, env=environ, stdout=PIPE, stderr=PIPE, **more
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            line = await read_line(process.stderr)
            while line and not line.startswith("firsttoken: serving"):
                line = await read_line(process.stderr)
        yield Served(process, line)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.communicate()


async def answered_by(url: str, model: str) -> tuple[str, str]:
    """Pool and text of a streamed answer."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": model, "messages": HELLO, "max_tokens": 4}
        raw = await client.chat.completions.with_raw_response.create(**asked, stream=True)
        text = "".join([event.choices[0].delta.content or "" async for event in raw.parse() if event.choices])
    return raw.headers["x-firsttoken-pool"], text


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_two_keys_and_an_ollama_give_a_first_token_for_less_than_ten_seconds_of_cpu(tmp_path: Path) -> None:
    """One command, without a file. Nothing but a list of models is asked of an API, and no key is printed."""
    async with (
        http_server(*ollama("llama3.2")) as port,
        engines(profile="api", model="gpt-5") as (first,),
        engines(profile="api", model="llama-3.3-70b-versatile") as (second,),
    ):
        environ = environment(**KEYS, OPENAI_BASE_URL=f"{first.url}/v1", GROQ_BASE_URL=f"{second.url}/v1")
        async with started(tmp_path, environ, "up", *FREE_PORTS, "--local", str(port)) as gateway:
            assert [*first.requests, *second.requests] == []
            assert (await answered_by(gateway.url, "fast"))[1]
            assert cpu_of(gateway.process.pid) < 10
            found = [(await answered_by(gateway.url, name))[0] for name in ("ollama/llama3.2", "llama3.2", "gpt-5")]
            assert found == ["ollama", "ollama", "openai"]
            assert (await answered_by(gateway.url, "groq/llama-3.3-70b-versatile"))[0] == "groq"
            async with aiohttp.ClientSession() as client, client.get(gateway.admin) as page:
                assert (page.url.path, page.status) == ("/dashboard", 200)
            gateway.process.terminate()
            _, out, err = await gateway.ends()
    assert re.search(r"^ollama +127\.0\.0\.1:\d+ +llama3\.2 +llama3\.2 \d+ ms +ok$", out, re.MULTILINE)
    assert f"base_url  {gateway.url}/v1      models: best, balanced, fast" in err
    assert not any(key in out + err for key in KEYS.values())
    assert os.listdir(tmp_path) == []


async def test_serve_without_a_file_reaches_every_key_and_asks_nothing(tmp_path: Path) -> None:
    """No prompt is sent before a caller's. A key whose API cannot be reached is shown, and kept."""
    async with engines(profile="api", model="gpt-5") as (api,), engines(model="m") as (engine,):
        environ = environment(**KEYS, OPENAI_BASE_URL=f"{api.url}/v1", GROQ_BASE_URL="http://127.0.0.1:9/v1")
        async with started(tmp_path, environ, "serve", *FREE_PORTS, "--local", str(engine.port)) as gateway:
            assert [*api.requests, *engine.requests] == []
            assert [(await answered_by(gateway.url, name))[0] for name in ("openai/gpt-5", "m")] == ["openai", "vllm"]
            with pytest.raises(openai.APIStatusError) as unreachable:
                await answered_by(gateway.url, "groq/m")
            with pytest.raises(openai.NotFoundError, match=r"Did you mean openai/gpt-5\?"):
                await answered_by(gateway.url, "gpt-55")
    assert unreachable.value.status_code in (502, 503)


async def test_a_written_file_is_what_is_served_and_is_never_overwritten(tmp_path: Path) -> None:
    """It holds the name of a variable, not the key."""
    async with http_server(*ollama("llama3.2")) as port, engines(profile="api", model="gpt-5") as (api,):
        environ = environment(**KEYS, OPENAI_BASE_URL=f"{api.url}/v1", GROQ_BASE_URL=f"{api.url}/v1")
        options = ("up", "--write", *FREE_PORTS, "--local", str(port))
        async with started(tmp_path, environ, *options) as gateway:
            written = (tmp_path / "firsttoken.yaml").read_text()
            assert (await answered_by(gateway.url, "ollama/llama3.2")) == ("ollama", "hi")
        process = await asyncio.create_subprocess_exec(*COMMAND, *options, cwd=tmp_path, env=environ, stderr=PIPE)
        _, err = await process.communicate()
    assert (process.returncode, err.startswith(b"firsttoken.yaml exists and is not overwritten")) == (2, True)
    assert (tmp_path / "firsttoken.yaml").read_text() == written
    assert not any(key in written for key in KEYS.values())
    config = load([tmp_path / "firsttoken.yaml"], environ)
    assert list(config.routes) == ["best", "balanced", "fast"]


async def test_up_hands_no_sockets_over_and_serves_on(tmp_path: Path) -> None:
    """The same command would listen on the next free port: who has the address would be left behind."""
    async with engines(model="m") as (engine,):
        options = ("up", *FREE_PORTS, "--local", str(engine.port))
        async with started(tmp_path, environment(), *options) as gateway:
            gateway.process.send_signal(signal.SIGUSR2)
            while "up` hands no sockets over" not in (line := await gateway.line()):
                assert line
            async with aiohttp.ClientSession() as client, client.get(f"{gateway.url}/ready") as reply:
                assert reply.status == 200


def test_a_pasted_line_runs_nothing_that_a_server_has_named() -> None:
    """The name of a model is one word of the shell, and one string of JSON."""
    evil = "a';reboot;'$(reboot)`reboot`\"\\"
    pool = {"backend": "ollama", "models": [evil]}
    config = Config.model_validate({"pools": {"ollama": pool}})
    curl, _, claude = greeting_of(config, "http://127.0.0.1:1", "http://127.0.0.1:2").splitlines()[5:8]
    assert json.loads(shlex.split(curl)[-1])["model"] == f"ollama/{evil}"
    assert shlex.split(claude)[2:] == [f"ANTHROPIC_MODEL=ollama/{evil}", "claude"]


async def test_without_any_server_the_ways_out_are_named(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "up", "--local", "none", cwd=tmp_path, env=environment(), stderr=PIPE
    )
    _, err = await process.communicate()
    assert (process.returncode, err.count(b"\n")) == (2, 1)
    assert err.startswith(b"no server was found: no --config, no answer on no port of 127.0.0.1, and no key in the")


@pytest.mark.parametrize(("typed", "prompts"), [(b"y\n", 1), (b"\n", 0)])
async def test_a_user_at_a_terminal_is_asked_before_a_token_costs(tmp_path: Path, typed: bytes, prompts: int) -> None:
    """The question names the models; Enter alone is no."""
    ours, theirs = pty.openpty()
    async with engines(profile="api", model="gpt-5") as (api,):
        environ = environment(OPENAI_API_KEY=KEYS["OPENAI_API_KEY"], OPENAI_BASE_URL=f"{api.url}/v1")
        command = (*COMMAND, "up", *FREE_PORTS, "--local", "none")
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, env=environ, stdin=theirs, stdout=theirs, stderr=PIPE
        )
        os.close(theirs)
        try:
            shown = b""
            async with asyncio.timeout(60):
                while b"[y/N]" not in shown:
                    shown += await asyncio.to_thread(os.read, ours, 4096)
                assert (b"Time the first token of openai/gpt-5?" in shown, len(api.requests)) == (True, 0)
                os.write(ours, typed)
                assert process.stderr is not None
                while not (await process.stderr.readline()).startswith(b"firsttoken: serving"):
                    pass
            assert [request.body["model"] for request in api.requests] == ["gpt-5"] * prompts
        finally:
            process.terminate()
            await process.communicate()
            os.close(ours)


async def test_the_quick_start_of_the_readme_gives_a_first_token(tmp_path: Path) -> None:
    """At most six lines for one OpenAI key and Ollama, run by a shell as they stand. Only what differs from machine to
    machine is put in their place: the ports, the URL of OpenAI, the installation, and the model to fetch."""
    page = (ROOT / "README.md").read_text("utf-8")
    block = page.partition("<!-- quick start -->\n```sh\n")[2].partition("```")[0]
    lines = block.splitlines()
    assert 0 < len(lines) <= 6
    async with http_server(*ollama("llama3.2")) as port, engines(profile="api", model="gpt-5") as (api,):
        ports = await free_ports()
        options = f"--local {port} --port {ports[0]} --admin-port {ports[1]}"
        write_program(tmp_path / "firsttoken", f'exec "{sys.executable}" -m gateway.cli "$@" {options}')
        for name in ("make", "ollama"):
            write_program(tmp_path / name, "exit 0")
        (tmp_path / ".venv/bin").mkdir(parents=True)
        (tmp_path / ".venv/bin/activate").touch()
        script = block.replace(":8080", f":{ports[0]}")
        environ = environment(OPENAI_BASE_URL=f"{api.url}/v1", PATH=f"{tmp_path}:{os.environ['PATH']}")
        command = ("bash", "-e", "-c", f"trap 'kill $!' EXIT; {script}")
        process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, env=environ, stdout=PIPE, stderr=PIPE)
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    answer = json.loads(out[out.index(b'{"') :])
    assert answer["choices"][0]["message"]["content"], err


def write_program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


async def free_ports() -> tuple[int, int]:
    async with http_server() as first, http_server() as second:
        return first, second
