"""`firsttoken check --live` against real sockets: six mistakes, hostile servers, prices and limits of time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli.main import main
from tests.support.builders import STREAMED
from tests.support.certificates import made
from tests.support.scripted_fleet import dead_url
from tests.support.simulated import engine_pool, engines
from tests.support.upstream import HANG, LAST_CHUNK, STREAM_HEAD, Received, Script, Upstream, chunk, reply

JSON = "content-type: application/json"
KEY = "sk-canary-0123456789abcdef"
MODELS = reply(b'{"object":"list","data":[{"id":"served"}]}', "200 OK", JSON)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def api(url: str, **more: Any) -> dict[str, Any]:
    return {"backend": "compatible", "model": "served", "endpoints": [url], "api_key": KEY, **more}


def write(document: dict[str, Any]) -> None:
    Path("f.yaml").write_text(yaml.safe_dump(document))


class Unlisted(Upstream):
    """Answers requests for completions alone."""

    def script(self, received: Received) -> Script:
        return [STREAMED if received.method == "POST" else reply(b"Not Found", "404 Not Found")]


class Command:
    """One run of the command, in a thread."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.code = 0
        self.out = self.err = ""

    async def run(self, pools: dict[str, Any], *options: str, routes: Any = None) -> list[str]:
        """Returns the faults and warnings."""
        routes = {"chat": {"tiers": list(pools), "ttft": "off"}} if routes is None else routes
        write({"pools": pools, "routes": routes})
        self.code = await asyncio.to_thread(main, ["check", "--live", "f.yaml", *options])
        self.out, self.err = self._capsys.readouterr()
        return [line for line in [*self.out.splitlines(), *self.err.splitlines()] if line.startswith(("fault", "warn"))]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


async def test_a_healthy_fleet_is_ok(command: Command) -> None:
    """Exit code 0: models listed, a first token measured, no finding."""
    async with engines(2) as servers:
        assert await command.run({"own": engine_pool(*servers)}) == []
    assert (command.code, command.err) == (0, "")
    assert "each of 2 endpoints is asked for its models and for one token" in command.out
    assert [line.split()[-1] for line in command.out.splitlines() if line.startswith("own/")] == ["ok", "ok"]


# --------------------------------------------------------------------------- the six mistakes


async def test_a_wrong_key_is_found(command: Command) -> None:
    """The server's message echoes the key; the output does not hold it."""
    error = {"error": {"message": f"Incorrect API key provided: {KEY}.", "code": "invalid_api_key"}}
    async with Upstream([reply(json.dumps(error).encode(), "401 Unauthorized", JSON)]) as server:
        [line] = await command.run({"a": api(server.url)})
    assert (command.code, KEY in command.out + command.err) == (2, False)
    assert line.startswith(f"fault: a/{server.url[7:]} ({server.url}): refuses the key: 401 invalid_api_key")
    assert line.endswith("; correct the variable in api_key of pools.a")
    assert len(server.requests) == 1  # no token is asked for


async def test_a_wrong_model_is_found(command: Command) -> None:
    """The nearest name of the server's list is proposed."""
    async with engines() as [server]:
        [line] = await command.run({"a": engine_pool(server, model="severd")})
    assert command.code == 2
    assert line == (
        f"fault: a/127.0.0.1:{server.port} ({server.url}): does not know the model 'severd';"
        " correct the model of pools.a; did you mean 'served'?"
    )


async def test_a_dead_port_is_found(command: Command) -> None:
    url = dead_url()
    [line] = await command.run({"a": api(url)})
    assert line == f"fault: a/{url[7:]} ({url}): connection refused; start the server, or correct the port"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/v1", "/openai"])
async def test_a_wrong_path_is_found(command: Command, path: str) -> None:
    """The right one is looked for, and proposed."""
    async with engines() as [server]:
        [line] = await command.run({"a": engine_pool(server, endpoints=[server.url + path])})
    assert line.startswith(f"fault: a/127.0.0.1:{server.port} ({server.url}{path}): has no API there")
    assert line.endswith(f"; write {server.url}/v1")


async def test_an_expired_certificate_is_found(command: Command, tmp_path: Path) -> None:
    """A certificate of the pool's own authority, two days too late."""
    certificates = made(tmp_path / "old", server_days=-1)
    async with Upstream([MODELS], tls=certificates.serving()) as server:
        [line] = await command.run({"a": api(server.url, tls={"ca": str(certificates.ca)})})
    assert line == (
        f"fault: a/{server.url[8:]} ({server.url}): has a certificate that cannot be verified:"
        " certificate has expired; renew the certificate of the server"
    )


async def test_a_model_too_slow_for_its_budget_is_found(command: Command) -> None:
    """A warning: the endpoint is well, and the route cannot keep its budget. Asked twice: the first may be cold."""
    routes = {"chat": {"tiers": ["a"], "ttft": {"budget": "40ms"}}}
    async with engines(1, "8b-l4") as [server]:
        [line] = await command.run({"a": engine_pool(server)}, routes=routes)
        assert len(server.requests) == 2
    assert (command.code, command.err) == (0, "")
    assert line.startswith(
        f"warning: routes.chat.ttft.budget is 40ms, and its best endpoint, a/127.0.0.1:{server.port}"
    )
    assert line.endswith(", or add a faster pool")


# --------------------------------------------------------------------------- other causes


async def test_a_certificate_of_an_unknown_authority_is_found(command: Command, tmp_path: Path) -> None:
    async with Upstream([MODELS], tls=made(tmp_path / "own").serving()) as server:
        [line] = await command.run({"a": api(server.url)})
    assert "unable to get local issuer certificate; write the certificate of its authority into tls" in line


async def test_plain_http_at_an_https_url_is_found(command: Command) -> None:
    async with engines() as [server]:
        [line] = await command.run({"a": api(server.url.replace("http:", "https:"))})
    assert line.endswith("TLS handshake failed; write http:// if the server has no TLS; else correct its TLS settings")


async def test_a_server_that_hangs_is_found_within_its_timeout(command: Command) -> None:
    """Twenty hanging servers are asked side by side: the whole takes one timeout."""
    async with Upstream([HANG]) as server, asyncio.timeout(40):
        pools = {f"p{i}": api(f"{server.url}/p{i}/v1") for i in range(20)}
        lines = await command.run(pools, "--timeout", "3")
    assert [line.partition(": ")[0] for line in lines] == ["fault"] * 20
    assert "no answer within 3 s; look at the server" in lines[0]


async def test_a_silent_model_is_found(command: Command) -> None:
    """It lists its models, and sends no token."""
    async with Upstream([MODELS], [HANG]) as server:
        [line] = await command.run({"a": api(server.url)}, "--timeout", "3")
    assert line.endswith("has sent no token in its time; look at the server, or raise --timeout")


async def test_an_account_without_money_is_found(command: Command) -> None:
    error = b'{"error":{"message":"You exceeded your current quota","type":"insufficient_quota"}}'
    async with Upstream([MODELS], [reply(error, "429 Too Many Requests", JSON)]) as server:
        [line] = await command.run({"a": api(server.url)})
    assert line.endswith("; pay, or raise the limit of the account")


async def test_a_server_without_a_list_of_models_is_well_if_it_answers(command: Command) -> None:
    """Not every server has /v1/models."""
    async with Unlisted() as server:
        assert await command.run({"a": api(f"{server.url}/v1")}) == []
    assert command.code == 0


async def test_a_wrong_clock_is_a_warning(command: Command) -> None:
    """By the Date of the reply."""
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=600), usegmt=True)
    models = reply(b'{"data":[{"id":"served"}]}', "200 OK", f"date: {date}")
    async with Upstream([models]) as server:
        [line] = await command.run({"a": api(server.url)}, "--no-tokens")
    assert line.startswith(f"warning: the clock of a/{server.url[7:]} is ")
    assert command.code == 0


async def test_each_key_of_an_api_is_tried(command: Command) -> None:
    """The refused one is named by its number; the other is well."""

    class Keyed(Upstream):
        def script(self, received: Received) -> Script:
            if received.headers["authorization"] != "Bearer sk-first":
                return [reply(b'{"error":{"message":"no","code":"invalid_api_key"}}', "401 Unauthorized", JSON)]
            return [STREAMED if received.method == "POST" else MODELS]

    async with Keyed() as server:
        keyed = {"backend": "openai", "model": "served", "base_url": server.url, "api_keys": ["sk-first", "sk-second"]}
        [line] = await command.run({"a": keyed})
    assert line.startswith(f"fault: a/{server.url[7:]}/key2 ")
    assert line.endswith("correct the variable in api_keys of pools.a")


async def test_deployments_of_azure_are_not_looked_for_in_the_list_of_models(command: Command) -> None:
    """The list has the models of the resource."""
    async with Upstream([MODELS], [STREAMED], [MODELS]) as server:
        azure = {"backend": "azure", "model": "my-deployment", "base_url": server.url, "api_key": KEY}
        assert await command.run({"a": azure}) == []
        assert await command.run({"a": azure}, "--no-tokens") == []
    assert server.requests[0].target == "/openai/models?api-version=2024-10-21"
    assert server.requests[0].headers["api-key"] == KEY


async def test_a_pool_of_embeddings_is_a_warning(command: Command) -> None:
    """It refuses a chat; whether that matters the configuration does not say."""
    refusal = reply(b'{"error":{"message":"does not support chat","type":"invalid_request_error"}}', "400 Bad", JSON)
    async with Upstream([MODELS], [refusal]) as server:
        [line] = await command.run({"a": api(server.url)})
    assert (command.code, line.startswith("warning: "), "does not support chat; of no matter if" in line) == (
        0,
        True,
        True,
    )


async def test_an_endpoint_by_name_is_asked_once_for_all_its_addresses(command: Command) -> None:
    """`resolve` finds addresses in a running gateway alone."""
    async with engines() as [server]:
        named = {"url": f"http://localhost:{server.port}", "resolve": "10s"}
        assert await command.run({"a": engine_pool(server, endpoints=[named])}) == []
    assert command.code == 0


# --------------------------------------------------------------------------- costs


async def test_the_price_is_said_and_no_tokens_are_left_out_on_request(command: Command) -> None:
    """A pool without a price is named."""
    async with Upstream([MODELS], [STREAMED], [MODELS]) as server:
        pools = {"a": api(server.url, price={"input": 100, "output": 100}), "b": api(f"{server.url}/b")}
        await command.run({"a": pools["a"]})
        assert "again where it is late: 0.003400 USD at most, by the prices of the pools\n" in command.out
        await command.run({"a": pools["a"]}, "--no-tokens")
        assert "live: each of 1 endpoints is asked for its models; no tokens, no costs" in command.out
    assert [received.method for received in server.requests] == ["GET", "POST", "GET"]


def test_options_of_live_need_live(capsys: pytest.CaptureFixture[str]) -> None:
    write({"pools": {"p": api("http://a")}, "routes": {"r": {"tiers": ["p"]}}})
    assert main(["check", "f.yaml", "--no-tokens"]) == 2
    assert capsys.readouterr().err == "firsttoken: --no-tokens and --timeout belong to --live: add --live\n"


# --------------------------------------------------------------------------- hostile servers

ESCAPES = "\u001b[2Jok: all well\r\nfault: none\u202e"


@asynccontextmanager
async def hostile(*script: bytes) -> AsyncIterator[str]:
    async with Upstream(list(script)) as server:
        yield server.url


@pytest.mark.parametrize("options", [("--timeout", "10"), ("--timeout", "10", "--no-tokens")], ids=["tokens", "none"])
@pytest.mark.parametrize(
    "script",
    [
        [STREAM_HEAD, *[chunk(b"x" * 65_536)] * 80, LAST_CHUNK],
        [reply(b"[" * 1_000_000)],
        [reply(json.dumps({"data": [{"id": f"{i}" * 50} for i in range(30_000)]}).encode())],
        [reply(json.dumps({"data": [{"id": ESCAPES}, {"id": KEY}, {"id": None}, 7]}).encode())],
        [reply(json.dumps({"error": {"message": ESCAPES + KEY}}).encode(), "400 Bad Request")],
        [reply(json.dumps({"error": {"message": f"{KEY[:9]}\u0000{KEY[9:]}"}}).encode(), "400 Bad Request")],
        [b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000],
        [b"SSH-2.0-OpenSSH_9.9\r\n"],
        [reply(b"", "302 Found", "location: http://169.254.169.254/")],
    ],
    ids=["endless", "nested", "many", "escapes", "message", "torn-key", "head", "ssh", "redirect"],
)
async def test_hostile_replies_are_one_clean_line(
    command: Command, script: list[bytes], options: tuple[str, ...]
) -> None:
    """No control character, no key, no more than one line for an endpoint, in bounded time."""
    async with hostile(*script) as url, asyncio.timeout(60):
        lines = await command.run({"a": api(url, model="other")}, *options)
    assert len(lines) == 1 or (len(lines) == 0 and options[-1] != "--no-tokens")  # a whole answer may hold anything
    assert all(len(line) < 600 and line.isprintable() for line in lines)
    assert KEY not in command.out + command.err
    assert len(command.out.splitlines()) < 10


async def test_the_context_window_that_a_server_tells_is_told_where_the_pool_has_none_or_a_larger_one(
    command: Command,
) -> None:
    """A note, or a warning: prompts that are too long would go to the server, and be refused there. A hostile number is
    no window."""
    async with engines(1, "8b-l4") as [server]:
        assert await command.run({"a": engine_pool(server)}) == []
        assert "note: pools.a takes prompts of any length; add context_window: 32768" in command.out
        [line] = await command.run({"a": engine_pool(server, context_window=40_000)})
        assert line == "warning: context_window of pools.a is 40000, and its servers take 32768; lower it"
        assert await command.run({"a": engine_pool(server, context_window=32_768)}) == []
        assert "context_window" not in command.out
    for told in (True, -1, 10**30, "32768", None):
        listed = json.dumps({"object": "list", "data": [{"id": "served", "max_model_len": told}]}).encode()
        async with Upstream([reply(listed, "200 OK", JSON)]) as server:
            await command.run({"a": api(server.url)}, "--no-tokens")
            assert "context_window" not in command.out
