"""The blocks of README's "Start" and of docs/start.md, typed line by line into a shell, in four situations each: with
a key, with the placeholder, with a refused key, and with Ollama alone. Each ends with an answer, or with a sentence
that says what is missing; nothing is stopped by the terminal.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.gateway.cli.test_start_page import CLAUDE, block
from tests.gateway.cli.up.test_up import environment, free_ports
from tests.support.local_servers import answering, http_server, models
from tests.support.local_servers import chat as stream
from tests.support.typed_shell import TypedShell, firsttoken, script, stopped, typed_shell

GOOD, REFUSED, PLACEHOLDER = "sk-0123456789abcdef", "sk-revoked-0123456789", "sk-..."
SITUATIONS = ("key", "placeholder", "refused", "ollama")
ANSWER = r'"content": ?"hi|"text": ?"hi'
NO_KEY = "refused the gateway's credentials|refuses the (API )?key|refuses the gateway's"
MEND = "openai refuses the key: set OPENAI_API_KEY to a valid one"


async def chat(http: web.Request) -> web.StreamResponse:
    """An answer of one word, streamed or whole."""
    asked = await http.json()
    if asked.get("stream"):
        return await stream(http)
    message = {"role": "assistant", "content": "hi"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    named = {"id": "c", "object": "chat.completion", "created": 0, "model": asked["model"]}
    return web.json_response({**named, "choices": [choice], "usage": usage})


def api(*names: str) -> list[web.RouteDef]:
    """OpenAI, as far as the gateway asks; it knows one key."""

    def guarded(handler: Any) -> Any:
        async def handle(http: web.Request) -> web.StreamResponse:
            if http.headers.get("authorization") != f"Bearer {GOOD}":
                error = {
                    "message": "Incorrect API key provided.",
                    "type": "invalid_request_error",
                    "code": "invalid_api_key",
                }
                return web.json_response({"error": error}, status=401)
            return await handler(http)

        return handle

    async def listed(http: web.Request) -> web.Response:
        return web.json_response(models(*names, owner="openai"))

    return [web.get("/v1/models", guarded(listed)), web.post("/v1/chat/completions", guarded(chat))]


def ollama(*names: str) -> list[web.RouteDef]:
    """Names have tags, as Ollama lists them."""
    return [
        answering("/api/version", {"version": "0.13.1"}),
        answering("/api/ps", {"models": []}),
        answering("/v1/models", models(*names)),
        web.post("/v1/chat/completions", chat),
    ]


@dataclass
class Machine:
    """A shell, and ports of the servers and of the gateway."""

    shell: TypedShell
    folder: Path
    data: int
    admin: int
    local: int

    async def run(self, text: str) -> str:
        """Types the lines. Returns what was shown from the last on."""
        *first, last = text.replace(":8080", f":{self.data}").replace(":9090", f":{self.admin}").splitlines()
        for line in first:
            await self.shell.type(line)
        return await self.shell.type(last)


@asynccontextmanager
async def machine(folder: Path, situation: str) -> AsyncIterator[Machine]:
    data, admin = await free_ports()
    has_ollama = situation == "ollama"
    async with (
        http_server(*api("gpt-5", "gpt-5-mini", "gpt-4o")) as hosted,
        http_server(*(ollama("llama3.2:latest") if has_ollama else [])) as local,
    ):
        ports = f"--port {data} --admin-port {admin}"
        options = {
            "up": f"{ports} --local {local if has_ollama else 'none'}",
            "serve": ports,
            "agents": f"--url http://127.0.0.1:{data}",
            "top": f"--admin 127.0.0.1:{admin}",
        }
        firsttoken(folder / "firsttoken", options)
        script(folder / "make", "exit 0")
        script(folder / "claude", CLAUDE)
        if has_ollama:
            script(folder / "ollama", "exit 0")
        (folder / ".venv/bin").mkdir(parents=True)
        (folder / ".venv/bin/activate").touch()
        keys = {"key": GOOD, "refused": REFUSED, "placeholder": PLACEHOLDER}
        key = {"OPENAI_API_KEY": keys[situation]} if situation in keys else {}
        known = environment(
            OPENAI_BASE_URL=f"http://127.0.0.1:{hosted}/v1", PATH=f"{folder}:{os.environ['PATH']}", **key
        )
        async with typed_shell(folder, known) as shell:
            yield Machine(shell, folder, data, admin, local if has_ollama else hosted)


def quick_start() -> str:
    page = (Path(__file__).parents[3] / "README.md").read_text("utf-8")
    return page.partition("<!-- quick start -->\n```sh\n")[2].partition("```")[0]


def expect(shown: str, shell: TypedShell, found: str) -> None:
    assert not stopped(shell.shown), shell.shown
    assert re.search(found, shown), shell.shown


@pytest.mark.parametrize("situation", SITUATIONS)
async def test_the_quick_start_answers_or_says_what_is_missing(tmp_path: Path, situation: str) -> None:
    """`up` in the background asks nothing."""
    async with machine(tmp_path, situation) as found:
        shown = await found.run(quick_start())
        expect(shown, found.shell, ANSWER if situation in ("key", "ollama") else NO_KEY)


@pytest.mark.parametrize("situation", SITUATIONS)
async def test_claude_code_answers_or_says_what_is_missing(tmp_path: Path, situation: str) -> None:
    """What is missing is said when `up` has asked."""
    async with machine(tmp_path, situation) as found:
        shown = await found.run(block("claude-code"))
        expect(
            shown if situation in ("key", "ollama") else found.shell.shown,
            found.shell,
            ANSWER if situation in ("key", "ollama") else MEND,
        )


@pytest.mark.parametrize("situation", SITUATIONS)
async def test_vllm_servers_need_no_key(tmp_path: Path, situation: str) -> None:
    """The keys of the environment play no part."""
    async with http_server(*ollama("qwen3-8b")) as engine, machine(tmp_path, situation) as found:
        text = re.sub(
            r"http://10\.0\.0\.\d+:8000",
            f"http://127.0.0.1:{engine}",
            block("vllm").replace(", http://10.0.0.12:8000", ""),
        )
        shown = await found.run(text)
        expect(shown, found.shell, ANSWER)


@pytest.mark.parametrize("situation", SITUATIONS)
async def test_an_imported_configuration_answers_or_says_what_is_missing(tmp_path: Path, situation: str) -> None:
    """With Ollama alone, the variable of the key is not set."""
    async with machine(tmp_path, situation) as found:
        base = found.local if situation != "ollama" else 9
        params = f"{{model: openai/gpt-4o, api_base: 'http://127.0.0.1:{base}/v1', api_key: os.environ/OPENAI_API_KEY}}"
        (tmp_path / "config.yaml").write_text(f"model_list: [{{model_name: gpt-4o, litellm_params: {params}}}]\n")
        await found.run(block("litellm"))
        missing = "OPENAI_API_KEY is not set" if situation == "ollama" else NO_KEY
        expect(found.shell.shown, found.shell, ANSWER if situation == "key" else missing)


@pytest.mark.parametrize("situation", [*SITUATIONS, "no gateway"])
async def test_at_3_am_the_fault_is_named(tmp_path: Path, situation: str) -> None:
    """Or that no gateway runs."""
    async with machine(tmp_path, situation) as found:
        kind = "ollama" if situation == "ollama" else "openai"
        server = (
            f"endpoints: ['http://127.0.0.1:{found.local}']"
            if kind == "ollama"
            else f"base_url: 'http://127.0.0.1:{found.local}/v1', api_key: '${{OPENAI_API_KEY}}'"
        )
        model = "llama3.2:latest" if kind == "ollama" else "gpt-4o"
        (tmp_path / "fleet.yaml").write_text(
            f"pools: {{only: {{backend: {kind}, model: '{model}', {server}}}}}\nroutes: {{chat: {{tiers: [only]}}}}\n"
        )
        if situation != "no gateway":
            await found.shell.type("firsttoken serve fleet.yaml > served.log 2>&1 &")
            await found.shell.type(
                f"curl -so /dev/null --retry 60 --retry-delay 1 --retry-connrefused http://127.0.0.1:{found.admin}/fleet"
            )
        shown = await found.run(block("3am"))
        live = {"key": "1 endpoint", "ollama": "1 endpoint", "no gateway": "OPENAI_API_KEY is not set"}
        expect(shown, found.shell, live.get(situation, NO_KEY))
        if situation == "no gateway":
            expect(found.shell.shown, found.shell, "this is not the admin port of a running gateway")
