"""`firsttoken explain`: a decision in a table, from a configuration or from a running gateway."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import main
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines

pytestmark = pytest.mark.virtual_time

CONFIG = """
pools:
  large: {backend: vllm, model: l, endpoints: [http://10.0.0.1:8000, http://10.0.0.2:8000], price: {output: 2}}
  small: {backend: vllm, model: s, endpoints: [http://10.0.0.3:8000]}
routes:
  chat: {tiers: [large, {pool: small, when: {prompt_tokens: "<= 3"}}], ttft: {budget: 800ms}}
  nightly: {workload: batch, tiers: [small]}
"""
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.yaml").write_text(CONFIG)
    Path("r.json").write_text(json.dumps(CHAT))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["explain", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    "arguments",
    [("--config", "f.yaml", "r.json"), ("r.json", "--config", "f.yaml"), ("--config", "f.yaml", "--", "r.json")],
)
def test_a_decision_is_shown_as_a_table(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Outcome, ranked candidates, rejected endpoints; the request file may stand anywhere in the command."""
    code, out, err = run(capsys, *arguments)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith("place: tier 1: p50 ")
    assert lines[1] == "prompt: 8 tokens (large, small); 256 tokens of answer expected"
    assert re.fullmatch(r"budget: (7\d\d|800) ms left for the first token", lines[2])
    heading, first, chosen, second, behind = (line.split() for line in lines[4:9])
    assert heading == ["endpoint", "tier", "p50", "p90", "chance", "hit", "ahead", "run+wait", "price"]
    assert (first[0], second[0]) == ("1", "2")
    assert {first[1], second[1]} == {"large/10.0.0.1:8000", "large/10.0.0.2:8000"}
    assert (chosen[0], behind[0]) == ("chosen:", "p50")
    assert lines[8].endswith("as good as the first, which luck drew")
    assert lines[-2:] == ["rejected", "   small/10.0.0.3:8000 (tier 2): prompt_tokens 8 is not <= 3"]


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred columns, whatever endpoints are called; both ends of a name are kept."""
    long = "vllm-large-0.vllm-large.inference.svc.cluster.local"
    Path("f.yaml").write_text(CONFIG.replace("10.0.0.1", long).replace("prompt_tokens:", "tools: true, prompt_tokens:"))
    code, out, _ = run(capsys, "--config", "f.yaml", "r.json")
    assert (code, max(map(len, out.splitlines())) <= 100) == (0, True)
    assert re.search(r"large/vllm-large-\S*…\S*cluster\.local:8000 ", out)


def test_the_route_option_selects_the_route(capsys: pytest.CaptureFixture[str]) -> None:
    """`--route` replaces the request's model."""
    code, out, _ = run(capsys, "--config", "f.yaml", "r.json", "--route", "nightly")
    assert (code, "small/10.0.0.3:8000" in out, "no TTFT budget" in out) == (0, True, True)


def test_the_route_of_an_alias_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """With the pattern that has matched; a route's own name needs no line."""
    Path("f.yaml").write_text(CONFIG.replace("chat: {tiers", 'chat: {aliases: ["gpt-*"], tiers'))
    code, out, _ = run(capsys, "--config", "f.yaml", "r.json", "--route", "gpt-9")
    assert (code, out.splitlines()[0]) == (0, "route: chat, for the model 'gpt-9' (matches gpt-*)")


def test_a_body_with_prompt_is_a_completion(capsys: pytest.CaptureFixture[str]) -> None:
    """The path is derived from the body's fields: the file does not name the path."""
    Path("r.json").write_text('{"model": "chat", "prompt": "hello"}')
    code, out, _ = run(capsys, "--config", "f.yaml", "r.json", "--json")
    assert (code, json.loads(out)["outcome"]) == (0, "place")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "firsttoken: name the file of the request (see firsttoken explain --help)"),
        (("--config", "f.yaml", "none.json"), "none.json: cannot be read: No such file or directory"),
        (("--config", "f.yaml", "f.yaml"), "f.yaml: not valid JSON: invalid character (byte 1)"),
        (("--config", "f.yaml", "list.json"), "list.json: not a JSON object, which the body of a request is"),
        (("--config", "none.yaml", "r.json"), "none.yaml: cannot be read: No such file or directory"),
        (
            ("--config", "f.yaml", "r.json", "--route", "nope"),
            "r.json: The model 'nope' does not exist here. Known: chat, nightly.",
        ),
        (
            ("r.json", "--admin", "http://127.0.0.1:9"),
            "http://127.0.0.1:9: this is not the admin port of a running gateway: [Errno 111] Connection refused",
        ),
        (
            ("r.json", "--admin", "127.0.0.1"),
            "http://127.0.0.1:9090: this is not the admin port of a running gateway: [Errno 111] Connection refused",
        ),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2."""
    Path("list.json").write_text("[]")
    assert run(capsys, *arguments) == (2, "", f"{message}\n")


async def test_key_env_selects_the_api_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The key comes from the environment, never from the command line: cache salts depend on the key."""
    key = {"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest()}
    monkeypatch.setenv("WEB", "sk-web")
    monkeypatch.setenv("OTHER", "sk-other")
    async with engines(1) as one, running({"only": engine_pool(*one)}, keys=[key]) as gateway:
        found = [
            await asyncio.to_thread(run, capsys, "r.json", "--admin", gateway.admin_url, "--key-env", name)
            for name in ("WEB", "OTHER", "NONE")
        ]
    assert [code for code, _, _ in found] == [0, 2, 2]
    assert found[1][2] == f"{gateway.admin_url}: Incorrect API key provided: it is not known here.\n"
    assert found[2][2] == "firsttoken: the environment variable NONE, which --key-env names, is not set\n"


async def test_a_running_gateway_explains_the_decision(capsys: pytest.CaptureFixture[str]) -> None:
    """With `--admin` endpoints and errors are those of the gateway's POST /explain."""

    async def explain(*arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(run, capsys, *arguments)

    async with engines(1) as one, running({"only": engine_pool(*one)}) as gateway:
        code, table, _ = await explain("r.json", "--admin", gateway.admin_url)
        explanation: dict[str, Any] = json.loads(
            (await explain("r.json", "--admin", f"{gateway.admin_url}/", "--json"))[1]
        )
        refused = await explain("r.json", "--admin", gateway.admin_url, "--route", "nope")
        wrong_port = await explain("r.json", "--admin", one[0].url)
    endpoint = f"only/{one[0].host}:{one[0].port}"
    assert (code, endpoint in table) == (0, True)
    assert [candidate["endpoint"] for candidate in explanation["candidates"]] == [endpoint]
    assert refused == (2, "", f"{gateway.admin_url}: The model 'nope' does not exist here. Known: chat.\n")
    assert wrong_port == (2, "", f"{one[0].url}: HTTP 404\n")
