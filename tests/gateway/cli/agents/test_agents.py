"""Settings of coding agents: one source for the page, the command and the checks with the real agents."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import tomllib

import pytest
import yaml

from gateway.cli.agents.recipes import AGENTS, AgentSettings, GatewayFacts, settings, shown
from gateway.cli.main import main
from scripts import agents_page
from tests.programs.clients.manifest import ROOT, clients
from tests.programs.clients.run import agent_settings
from tests.support.gateways import pool, running

FACTS = GatewayFacts("http://10.0.0.1:8080", "sk-mine", "coder", "tiny", 32_768)
ENGINE = pool("http://127.0.0.1:9", context_window=32_768)
ROUTES = {
    "chat": {"tiers": ["only"], "aliases": ["claude-*", "$(id)", "gpt-4o"]},
    "far": {"tiers": ["unknown"]},
}
POOLS = {"only": ENGINE, "unknown": pool("http://127.0.0.1:9")}


async def told(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["agents", *arguments], [])


def text(found: AgentSettings) -> str:
    return "\n".join(shown(found)) + "\n"


def test_the_page_of_agents_is_generated_from_the_settings() -> None:
    """`python -m scripts.agents_page` writes it."""
    assert agents_page.PAGE.read_text("utf-8") == agents_page.page()


@pytest.mark.parametrize("name", AGENTS)
async def test_the_command_prints_what_the_page_shows_for_the_running_gateway(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its address, the first of its models and the window; a placeholder for the key."""
    async with running(POOLS, ROUTES) as gateway:
        assert await told(name, "--url", f"{gateway.url}/v1") == 0
        facts = GatewayFacts(gateway.url, "YOUR-KEY", "chat", "chat", 32_768)
    printed = capsys.readouterr().out
    assert printed == text(settings(AGENTS[name], facts))
    page = agents_page.PAGE.read_text("utf-8").replace("http://127.0.0.1:8080", gateway.url)
    for line in filter(None, printed.splitlines()):
        assert line.removeprefix("# ") in page or line == "# then"


@pytest.mark.parametrize("name", AGENTS)
def test_the_checks_with_the_real_agent_take_the_same_settings(name: str) -> None:
    """Every agent of the page is a client of `make clients`, whose script names no setting of its own."""
    [client] = [client for client in clients() if client.name == name]
    assert client.settings == f"firsttoken agents {name}"
    found = settings(AGENTS[name], FACTS)
    given = json.loads(agent_settings(FACTS)["AGENTS"])[name]
    assert AgentSettings(**given) == found
    script = client.source.read_text("utf-8")
    assert re.search(r"paste\(|\[\"AGENTS\"\]", script)
    assert not re.findall(r"BASE_URL|baseURL: |provider\(", script)


def test_settings_are_valid_in_the_form_of_their_file() -> None:
    readers = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load, "yml": yaml.safe_load}
    for agent in AGENTS.values():
        for facts in (FACTS, GatewayFacts("http://h", "k", "m", "m", None)):
            for path, written in settings(agent, facts).files.items():
                read = readers[path.rpartition(".")[2]](written)
                assert "32768" not in str(read) or facts.window


def test_what_is_unknown_is_left_out() -> None:
    """An agent then believes what it believes of any model."""
    found = settings(AGENTS["claude-code"], GatewayFacts("http://h", "k", "m", "s", None))
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in found.variables
    assert found.variables["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "s"


async def test_a_model_is_chosen_by_name_and_has_a_window_where_it_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with running(POOLS, ROUTES) as gateway:
        assert await told("codex", "--url", gateway.url, "--model", "far") == 0
        printed = capsys.readouterr().out
        assert 'model = "far"' in printed
        assert "model_context_window" not in printed
        for name in ("fer", "claude-*", "$(id)"):
            assert await told("codex", "--url", gateway.url, "--model", name) == 2
            assert f"no model '{name}'" in capsys.readouterr().err


async def test_a_key_is_used_to_ask_and_never_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings are pasted into tickets: they hold a placeholder."""
    key = "sk-team-0123456789"
    known = [{"name": "team", "sha256": hashlib.sha256(key.encode()).hexdigest()}]
    monkeypatch.setenv("TEAM_KEY", key)
    async with running(POOLS, ROUTES, keys=known) as gateway:
        assert await told("aider", "--url", gateway.url) == 2
        assert "--key-env" in capsys.readouterr().err
        assert await told("aider", "--url", gateway.url, "--key-env", "TEAM_KEY") == 0
    printed = capsys.readouterr()
    assert "export OPENAI_API_KEY=YOUR-KEY" in printed.out
    assert key not in printed.out + printed.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["claude"], "no agent 'claude'; did you mean 'claude-code'?"),
        (["codex", "--url", "http://127.0.0.1:1"], "this is not the data port of a running gateway"),
        (["codex", "--key-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        (["codex", "--url", "file:///etc/passwd#"], "not an address of HTTP"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agents", *arguments], []) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_without_a_name_the_agents_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agents"], []) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(AGENTS)


def test_every_agent_of_the_page_edits_a_file_in_the_kept_results() -> None:
    """By the latest run of `make clients`, before an engine of 32,768 tokens."""
    results = json.loads((ROOT / "tests/programs/clients/results.json").read_text("utf-8"))
    assert [name for name in AGENTS if "a file is edited" not in results["chat"][name]["passed"]] == []
