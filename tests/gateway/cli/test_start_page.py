"""The blocks of docs/start.md, run by a shell as they stand; test_up.py runs the one of the README.

Only what differs from machine to machine is put in its place: ports, addresses of servers, the installation, and
programs of others.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.gateway.cli.up.test_up import environment, free_ports, write_program
from tests.support.local_servers import http_server
from tests.support.served import ROOT, serving, write_config
from tests.support.simulated import engines

USERS = ("vllm", "claude-code", "litellm", "3am")  # besides the one with an OpenAI key and Ollama
CLAUDE = (
    'curl -s "$ANTHROPIC_BASE_URL/v1/messages" -H "authorization: Bearer $ANTHROPIC_AUTH_TOKEN"'
    ' -d "{\\"model\\": \\"$ANTHROPIC_MODEL\\", \\"max_tokens\\": 9, \\"messages\\":'
    ' [{\\"role\\": \\"user\\", \\"content\\": \\"$2\\"}]}"'
)


def block(user: str) -> str:
    page = (ROOT / "docs/start.md").read_text("utf-8")
    return page.partition(f"<!-- start: {user} -->\n```sh\n")[2].partition("```")[0]


async def run(folder: Path, script: str, options: Mapping[str, str], **environ: str) -> tuple[int | None, str, str]:
    """Exit code and output. `options`: of this machine, by command of `firsttoken`."""
    cases = " ".join(f'{name}) exec "{sys.executable}" -m gateway.cli "$@" {more};;' for name, more in options.items())
    write_program(folder / "firsttoken", f'case "$1" in {cases} *) exec "{sys.executable}" -m gateway.cli "$@";; esac')
    write_program(folder / "make", "exit 0")
    write_program(folder / "claude", CLAUDE)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    known = environment(PATH=f"{folder}:{os.environ['PATH']}", **environ)
    command = ("bash", "-e", "-c", f"trap 'kill $(jobs -p) 2>/dev/null' EXIT; {script}")
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, env=known, stdout=PIPE, stderr=PIPE)
    async with asyncio.timeout(240):  # up to five processes, one after the other
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("user", USERS)
def test_a_block_has_at_most_six_lines(user: str) -> None:
    """From nothing to an answer."""
    assert 0 < len(block(user).splitlines()) <= 6


async def test_vllm_servers_are_checked_and_answer(tmp_path: Path) -> None:
    """A platform engineer."""
    data, admin = await free_ports()
    async with engines(2, model="qwen3-8b") as (first, second):
        script = block("vllm").replace(":8080", f":{data}")
        for written, engine in (("http://10.0.0.11:8000", first), ("http://10.0.0.12:8000", second)):
            assert written in script
            script = script.replace(written, engine.url)
        _, out, err = await run(tmp_path, script, {"serve": f"--port {data} --admin-port {admin}"})
    assert '"object":"chat.completion"' in out.replace(" ", ""), err
    assert out.count(" ok\n") == 2


async def test_claude_code_is_set_up_by_what_agents_prints(tmp_path: Path) -> None:
    """With the name of a model that the gateway lists, and the URL that Claude Code wants."""
    data, admin = await free_ports()
    async with engines(model="m") as [engine]:
        options = {
            "up": f"--local {engine.port} --port {data} --admin-port {admin}",
            "agents": f"--url http://127.0.0.1:{data}",
        }
        _, out, err = await run(tmp_path, block("claude-code").replace(":8080", f":{data}"), options)
    assert '"type":"message"' in out.replace(" ", ""), err


async def test_a_configuration_of_litellm_is_imported_and_served(tmp_path: Path) -> None:
    """Callers keep the name of their model."""
    data, admin = await free_ports()
    async with engines(profile="api", model="gpt-4o") as [api]:
        params = f"{{model: openai/gpt-4o, api_base: {api.url}/v1, api_key: os.environ/OPENAI_API_KEY}}"
        (tmp_path / "config.yaml").write_text(f"model_list: [{{model_name: gpt-4o, litellm_params: {params}}}]\n")
        script = block("litellm").replace(":8080", f":{data}")
        options = {"serve": f"--port {data} --admin-port {admin}"}
        _, out, err = await run(tmp_path, script, options, OPENAI_API_KEY="sk-0123456789abcdef")
    assert '"object":"chat.completion"' in out.replace(" ", ""), err


async def test_someone_at_3_am_sees_the_endpoint_that_is_down(tmp_path: Path) -> None:
    """In each of the places, and `check --live` names the mend."""
    async with http_server() as dead:
        pass
    config = write_config(tmp_path / "fleet.yaml", f"http://127.0.0.1:{dead}")
    async with serving(config) as gateway:
        script = block("3am").replace("http://127.0.0.1:9090", gateway.admin)
        code, out, err = await run(tmp_path, script, {"top": f"--admin {gateway.admin}"})
    assert code == 2
    assert out.count(f"only/127.0.0.1:{dead}") >= 2
    assert "connection refused; start the server, or correct the port" in err
