"""Parts of the runner of `make clients`. Clients themselves need the network and are run there."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from tests.programs.clients import page
from tests.programs.clients.manifest import FOLDER, PINNED, ROOT, clients, node_package
from tests.programs.clients.run import ClientRun, gateway, run

NO_SETTINGS: dict[str, str] = {}
SOME = ("chat", "chat: stream", "chat: parallel tools, streamed", "chat: cached tokens", "chat: abort", "error 429")


def test_every_version_is_pinned() -> None:
    """A later release is tried on purpose, never by chance."""
    packages = [package for client in clients() for package in client.packages]
    assert [package for package in (node_package(), *packages) if not PINNED.fullmatch(package)] == []


def test_every_client_has_a_script_and_every_script_a_client() -> None:
    scripts = {path for path in FOLDER.glob("*/*") if path.stem != "harness" and path.suffix in (".py", ".mjs")}
    assert {client.source for client in clients()} == scripts


async def test_the_openai_sdk_of_this_environment_passes_checks_against_a_gateway_process() -> None:
    """Engine, gateway, script and reader together."""
    async with gateway() as settings:
        found = await run([sys.executable, str(FOLDER / "python" / "openai_checks.py"), *SOME], settings)
    assert (found.passed, found.failed, found.ended) == (list(SOME), {}, "")
    assert list(found.versions) == ["openai"]


async def test_a_check_that_does_not_hold_is_reported_with_its_reason(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(FOLDER / 'python')!r})\n"
        "from harness import check, expect, main\n"
        "check('good')(lambda: None)\n"
        "check('wrong')(lambda: expect(1 == 2, 'one is not two'))\n"
        "main()\n"
    )
    async with gateway() as settings:
        found = await run([sys.executable, str(script)], settings)
    assert (found.passed, found.failed) == (["good"], {"wrong": "AssertionError: one is not two"})
    assert not found.green("chat")


async def test_a_check_that_the_engine_cannot_serve_is_named_with_the_reason() -> None:
    """Not run, no failure, and no pass. The reason is kept by the end of a check's name."""
    told = {"LEFT_OUT": '{"images": "no vision"}'}
    async with gateway() as settings:
        script = str(FOLDER / "python" / "openai_checks.py")
        found = await run([sys.executable, script, "chat", "chat: images", "responses: images"], settings | told)
    assert (found.passed, found.failed) == (["chat"], {})
    assert found.left_out == {"chat: images": "no vision", "responses: images": "no vision"}
    written = page.page({"vllm": {"openai-python": {**asdict(found), "date": "2026-11-22"}}})
    assert "| real vLLM | no vision | chat: images; responses: images | openai-python |" in written


async def test_a_script_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text('print(\'{"check": "first", "passed": true}\', flush=True); raise SystemExit("no such module")')
    found = await run([sys.executable, str(script)], NO_SETTINGS)
    assert (found.passed, found.green("chat")) == (["first"], False)
    assert "exit code 1: no such module" in found.ended


async def test_a_script_that_hangs_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text("import time; print('a word of the client'); time.sleep(60)")
    found = await run([sys.executable, str(script)], NO_SETTINGS, within=1)
    assert found.ended == "not done within 1 s"


def test_the_page_states_every_check_that_does_not_pass() -> None:
    found = {
        "versions": {"openai": "1.0"},
        "passed": ["chat"],
        "failed": {"models: get": "NotFoundError: nothing | there"},
        "ended": "not done within 1 s",
        "date": "2026-11-22",
    }
    written = page.page({"messages": {"openai-python": found}})
    assert "**Messages engine: 1 of 2 checks of 1 clients pass.**" in written
    assert "| Messages engine | openai-python | models: get | NotFoundError: nothing \\| there |" in written
    assert "| Messages engine | openai-python | the rest | not done within 1 s |" in written


def test_the_page_of_clients_is_generated_from_the_results() -> None:
    """`make clients` writes both."""
    assert (ROOT / "docs/clients.md").read_text("utf-8") == page.page(page.load())


def test_a_run_is_green_if_all_checks_pass_that_the_engine_can_serve() -> None:
    """Anthropic has no embeddings."""
    assert not ClientRun().green("chat")
    refused = ClientRun(passed=["chat"], failed={"embeddings": "refused by name"})
    assert (refused.green("chat"), refused.green("messages")) == (False, True)
    assert not ClientRun(passed=["chat"], failed={"chat: tools": "wrong"}).green("messages")
