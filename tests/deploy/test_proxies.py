"""The configurations of nginx and HAProxy under deploy/ in front of real gateways: only addresses and files differ."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
import subprocess
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.processes import free_port
from gateway.app import Gateway
from tests.support.builders import CHAT, DONE, FINISH, TOKEN, WHOLE
from tests.support.certificates import Certificates, made
from tests.support.gateways import pool, running
from tests.support.upstream import GATE, HANG, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk, reply

DEPLOY = Path(__file__).parents[2] / "deploy"
STREAM = {**CHAT, "stream": True}
SLOW: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]
JSON = reply(WHOLE, "200 OK", "content-type: application/json")
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")  # folders of nginx


def http2_in_curl() -> bool:
    if shutil.which("curl") is None:
        return False
    return "HTTP2" in subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout


needs_http2 = pytest.mark.skipif(not http2_in_curl(), reason="needs curl with HTTP/2")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return made(tmp_path_factory.mktemp("certificates"))


def replaced(text: str, changes: dict[str, str]) -> str:
    """Each of the texts is there once."""
    for before, after in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def nginx(folder: Path, port: int, gateways: list[str], certificates: Certificates) -> list[str]:
    server = "server 127.0.0.1:8080 max_fails=1 fail_timeout=2s;"
    user = " user root;" if os.geteuid() == 0 else ""  # its workers write to the test's folder
    paths = "".join(f"    {name}_temp_path {folder / name};\n" for name in TEMPORARY)
    text = replaced(
        (DEPLOY / "nginx/nginx.conf").read_text(),
        {
            "http {\n": f"http {{\n{paths}    access_log off;\n",
            "listen 443 ssl http2;": f"listen 127.0.0.1:{port} ssl http2;",
            server: "\n".join(server.replace("127.0.0.1:8080", gateway) for gateway in gateways),
            "/etc/nginx/tls.crt": str(certificates.folder / "server.pem"),
            "/etc/nginx/tls.key": str(certificates.folder / "server.key"),
            "worker_processes auto": "worker_processes 1",
        },
    )
    config = folder / "nginx.conf"
    config.write_text(text)
    return ["nginx", "-p", str(folder), "-c", str(config), "-e", "stderr", "-g", f"daemon off; pid {folder}/pid;{user}"]


def haproxy(folder: Path, port: int, gateways: list[str], certificates: Certificates) -> list[str]:
    server = "server gateway1 127.0.0.1:8080"
    text = replaced(
        (DEPLOY / "haproxy/haproxy.cfg").read_text(),
        {
            "maxconn 20000": "maxconn 1000",  # a shell's limit of open files
            "bind :443": f"bind 127.0.0.1:{port}",
            server: "\n    ".join(f"server gateway{n} {gateway}" for n, gateway in enumerate(gateways, 1)),
            "/etc/haproxy/tls.pem": str(certificates.server),
        },
    )
    config = folder / "haproxy.cfg"
    config.write_text(text)
    return ["haproxy", "-db", "-f", str(config)]


PROXIES = [
    pytest.param(
        make, id=make.__name__, marks=pytest.mark.skipif(shutil.which(make.__name__) is None, reason="not installed")
    )
    for make in (nginx, haproxy)
]


@dataclass
class Fronted:
    """A proxy in front of gateways that share an upstream."""

    url: str
    ca: Path
    upstream: Upstream
    gateways: list[Gateway] = field(default_factory=list)

    async def curl(self, *arguments: str, body: Any = None, path: str = "/v1/chat/completions") -> Process:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = () if body is None else ("-H", "content-type: application/json", "--data-binary", "@-")
        process = await asyncio.create_subprocess_exec(
            *("curl", "-sSN", "--http2", "--cacert", str(self.ca), *arguments, *sent, self.url + path),
            stdin=PIPE,
            stdout=PIPE,
        )
        assert process.stdin is not None
        if body is not None:
            process.stdin.write(raw)
        process.stdin.close()
        return process

    async def asked(self, body: Any = CHAT, path: str = "/v1/chat/completions") -> tuple[str, str]:
        """HTTP version and status."""
        process = await self.curl("-o", "/dev/null", "-w", "%{http_version} %{http_code}", body=body, path=path)
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        version, _, status = out.decode().partition(" ")
        return version, status

    async def until_served(self, served: bool) -> None:
        async with asyncio.timeout(60):
            while ((await self.asked())[1] == "200") is not served:  # noqa: ASYNC110
                await asyncio.sleep(0.2)


@pytest.fixture(params=PROXIES)
def proxy(request: pytest.FixtureRequest) -> Any:
    return request.param


async def ended(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
        await process.communicate()


@asynccontextmanager
async def fronted(
    proxy: Any, folder: Path, certificates: Certificates, *scripts: Script, count: int = 1, **more: Any
) -> AsyncIterator[Fronted]:
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Upstream(*scripts))
        gateways = [
            await stack.enter_async_context(running({"only": pool(upstream.url)}, **more)) for _ in range(count)
        ]
        port = free_port()
        addresses = [gateway.url.removeprefix("http://") for gateway in gateways]
        process = await asyncio.create_subprocess_exec(*proxy(folder, port, addresses, certificates), stderr=PIPE)
        stack.push_async_callback(ended, process)
        found = Fronted(f"https://localhost:{port}", certificates.ca, upstream, gateways)
        async with asyncio.timeout(60):
            while (await found.asked(None, "/ready"))[1] != "200":
                assert process.returncode is None, await process.communicate()
                await asyncio.sleep(0.1)
        yield found


@needs_http2
async def test_tokens_pass_one_by_one_over_http2(proxy: Any, tmp_path: Path, certificates: Certificates) -> None:
    """The first arrives while the engine holds the rest."""
    async with fronted(proxy, tmp_path, certificates, SLOW) as front:
        process = await front.curl("-w", "%{http_version}", body=STREAM)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            first = await process.stdout.readuntil(b"\n\n")
            front.upstream.proceed()
            rest = await process.stdout.read()
        await process.wait()
    assert (first, rest) == (TOKEN, FINISH + DONE + b"2")


@needs_http2
async def test_comments_before_the_first_token_pass(proxy: Any, tmp_path: Path, certificates: Certificates) -> None:
    """While the engine is silent."""
    defaults = {"keepalive": "100ms"}
    async with fronted(proxy, tmp_path, certificates, [GATE, *SLOW[:1]], defaults=defaults) as front:
        process = await front.curl(body=STREAM)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert [await process.stdout.readuntil(b"\n\n") for _ in range(2)] == [b": keep-alive\n\n"] * 2
        process.kill()
        await process.wait()


@needs_http2
async def test_a_caller_that_leaves_ends_the_request_upstream(
    proxy: Any, tmp_path: Path, certificates: Certificates
) -> None:
    async with fronted(proxy, tmp_path, certificates, [STREAM_HEAD + chunk(TOKEN), HANG]) as front:
        process = await front.curl(body=STREAM)
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readuntil(b"\n\n"), 60)
        process.kill()
        await process.wait()
        await front.upstream.until(lambda upstream: upstream.hangups == 1)


@needs_http2
async def test_connections_to_the_gateway_are_kept(proxy: Any, tmp_path: Path, certificates: Certificates) -> None:
    """Twenty callers, each on a connection of its own."""
    async with fronted(proxy, tmp_path, certificates, [JSON]) as front:
        (gateway,) = front.gateways
        assert gateway.data_port.server is not None
        accepted: set[int] = set()
        for _ in range(20):
            assert await front.asked() == ("2", "200")
            accepted |= {id(connection) for connection in gateway.data_port.server.connections}
    assert 0 < len(accepted) <= 3


@needs_http2
async def test_a_gateway_that_stops_costs_no_request(proxy: Any, tmp_path: Path, certificates: Certificates) -> None:
    """It drains, then refuses connections."""
    async with fronted(proxy, tmp_path, certificates, [JSON], count=2) as front:
        for _ in range(4):
            assert await front.asked() == ("2", "200")
        await front.gateways[0].stop()
        assert [await front.asked() for _ in range(8)] == [("2", "200")] * 8


@needs_http2
async def test_bodies_pass_up_to_the_gateways_own_limit(proxy: Any, tmp_path: Path, certificates: Certificates) -> None:
    """defaults.max_body, 32 MB; 30 MB are not valid JSON, which the gateway alone can know."""
    async with fronted(proxy, tmp_path, certificates, [JSON]) as front:
        assert await front.asked(b"x" * 30_000_000) == ("2", "400")
        assert await front.asked(b"x" * 34_000_000) == ("2", "413")


async def test_a_websocket_is_opened_or_refused_by_the_gateway(
    proxy: Any, tmp_path: Path, certificates: Certificates
) -> None:
    """With 426 where the proxy passes on a part of the offer alone: coding agents go on with HTTP."""
    trust = ssl.create_default_context(cafile=str(certificates.ca))
    async with fronted(proxy, tmp_path, certificates, [JSON]) as front, aiohttp.ClientSession() as client:
        try:
            async with client.ws_connect(f"{front.url}/v1/responses", ssl=trust):
                status = 101
        except aiohttp.WSServerHandshakeError as refused:
            status = refused.status
    assert status == (101 if proxy is haproxy else 426)


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="needs haproxy")
async def test_haproxy_leaves_out_a_gateway_that_is_not_ready(tmp_path: Path, certificates: Certificates) -> None:
    """Its checks ask /ready: no gateway is left, so HAProxy refuses requests itself."""
    async with fronted(haproxy, tmp_path, certificates, [JSON]) as front:
        front.gateways[0].proxy.draining = True
        await front.until_served(False)
        front.gateways[0].proxy.draining = False
        await front.until_served(True)
