"""TLS on the data port with certificates made by openssl: versions, renewal, wrong files, workers."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import uvloop

from gateway.app import Gateway
from gateway.cli.main import main
from tests.e2e.test_workers import workers_of
from tests.support.builders import CHAT, DONE, FINISH, STREAMED, TOKEN, WHOLE, Caller, get, post
from tests.support.certificates import Certificates, made
from tests.support.gateways import pool, running
from tests.support.served import serving
from tests.support.simulated import eventually
from tests.support.upstream import GATE, HANG, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk, reply

STREAM = {**CHAT, "stream": True}
SLOW: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]
JSON = reply(WHOLE, "200 OK", "content-type: application/json")
NOTICED = 60.0  # s, on a busy machine; two looks at the files are 2 s


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return made(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return made(tmp_path_factory.mktemp("new"))


class Installed:
    """Certificate and key as a gateway finds them, and callers that trust both authorities."""

    def __init__(self, folder: Path, *authorities: Certificates) -> None:
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        self.section = {"certificate": str(self.certificate), "key": str(self.key)}
        self.trust = ssl.create_default_context()
        for authority in authorities:
            self.trust.load_verify_locations(authority.ca)
        self.install(authorities[0])

    def install(self, source: Certificates, *, certificate: bool = True, key: bool = True) -> None:
        for wanted, name, target in ((certificate, "server.pem", self.certificate), (key, "server.key", self.key)):
            if wanted:
                shutil.copyfile(source.folder / name, target)

    @asynccontextmanager
    async def calling(self, url: str, trust: ssl.SSLContext | None = None) -> AsyncIterator[Caller]:
        where = "localhost", int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection(*where, ssl=trust or self.trust, family=2)
        try:
            yield Caller(reader, writer)
        finally:
            writer.transport.abort()

    async def presented(self, url: str) -> bytes:
        """The certificate of a new connection."""
        async with self.calling(url) as caller:
            return certificate_of(caller)

    async def until_presented(self, url: str, source: Certificates) -> None:
        async with asyncio.timeout(NOTICED):
            while await self.presented(url) != der(source):  # noqa: ASYNC110
                await asyncio.sleep(0.1)


def certificate_of(caller: Caller) -> bytes:
    found = caller.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    assert isinstance(found, bytes)
    return found


def der(source: Certificates) -> bytes:
    return ssl.PEM_cert_to_DER_cert((source.folder / "server.pem").read_text())


@pytest.fixture
def installed(tmp_path: Path, old: Certificates, new: Certificates) -> Installed:
    return Installed(tmp_path, old, new)


@asynccontextmanager
async def secured(installed: Installed, upstream: Upstream, **more: Any) -> AsyncIterator[Gateway]:
    server = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "tls": installed.section}
    async with running({"only": pool(upstream.url)}, server=server, **more) as gateway:
        yield gateway


# --------------------------------------------------------------------------- serving


async def test_an_sdk_works_over_tls(installed: Installed) -> None:
    async with Upstream([JSON], [STREAMED]) as upstream, secured(installed, upstream) as gateway:
        assert gateway.url.startswith("https://127.0.0.1:")
        http = httpx2.AsyncClient(verify=installed.trust)
        url = gateway.url.replace("127.0.0.1", "localhost")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client:
            asked: Any = CHAT
            answer = await client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(**asked, stream=True)
            streamed = "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])
    assert (answer.choices[0].message.content, streamed) == ("hi", "hi")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_caller_may_speak_either_version_of_tls(installed: Installed, version: ssl.TLSVersion) -> None:
    """A caller that would prefer HTTP/2 agrees on HTTP/1.1."""
    trust = installed.trust
    trust.minimum_version = trust.maximum_version = version
    trust.set_alpn_protocols(["h2", "http/1.1"])
    async with (
        Upstream([JSON]) as upstream,
        secured(installed, upstream) as gateway,
        installed.calling(gateway.url) as caller,
    ):
        tls = caller.writer.get_extra_info("ssl_object")
        assert (tls.version(), tls.selected_alpn_protocol()) == (version.name.replace("v1_", "v1."), "http/1.1")
        assert (await caller.whole(post(CHAT)))[0] == 200


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_tls_1_1_is_refused(installed: Installed, old: Certificates) -> None:
    """By the gateway, not by the caller: another server agrees with the same caller."""
    trust, lenient = installed.trust, old.serving()
    for context in (trust, lenient):
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = ssl.TLSVersion.TLSv1_1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with Upstream([JSON], tls=lenient) as upstream:
        async with installed.calling(upstream.url) as caller:
            assert caller.writer.get_extra_info("ssl_object").version() == "TLSv1.1"
        async with secured(installed, upstream) as gateway:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                async with installed.calling(gateway.url):
                    pass


async def test_refusals_arrive_whole(installed: Installed) -> None:
    """TLS has no half-closed connection, by which a reply to an unfinished request ends over plain TCP."""
    async with (
        Upstream([JSON]) as upstream,
        secured(installed, upstream, defaults={"max_body": "1KB"}) as gateway,
        installed.calling(gateway.url) as caller,
    ):
        large = post(b"x" * 100_000)
        status, headers, body = await caller.whole(large[:5_000])
        assert (status, headers["connection"], b"larger than" in body) == (413, "close", True)
        async with installed.calling(gateway.url) as other:
            status, headers, body = await other.whole(b"NONSENSE\r\n\r\n")
            assert (status, len(body)) == (400, int(headers["content-length"]))
            assert await other.rest() == b""


async def test_a_caller_that_leaves_ends_the_request_upstream(installed: Installed) -> None:
    async with (
        Upstream([STREAM_HEAD + chunk(TOKEN), HANG]) as upstream,
        secured(installed, upstream) as gateway,
        installed.calling(gateway.url) as caller,
    ):
        assert (await caller.ask(post(STREAM)))[0] == 200
        caller.writer.close()
        await upstream.until(lambda upstream: upstream.hangups == 1)


async def test_plain_http_is_hung_up_on_without_a_traceback(
    installed: Installed, caplog: pytest.LogCaptureFixture
) -> None:
    async with Upstream([JSON]) as upstream, secured(installed, upstream) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(post(CHAT))
        assert b"HTTP" not in await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert await installed.presented(gateway.url)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


# --------------------------------------------------------------------------- renewal


async def test_a_renewed_certificate_meets_new_connections_and_leaves_the_old_alone(
    installed: Installed, old: Certificates, new: Certificates
) -> None:
    """A stream in progress ends whole, and its connection serves on."""
    async with (
        Upstream(SLOW, [JSON]) as upstream,
        secured(installed, upstream) as gateway,
        installed.calling(gateway.url) as caller,
    ):
        assert (await caller.ask(post(STREAM)))[0] == 200
        assert certificate_of(caller) == der(old)
        installed.install(new)
        await installed.until_presented(gateway.url, new)
        upstream.proceed()
        assert b"".join(await caller.chunks()).endswith(DONE)
        assert (await caller.whole(post(CHAT)))[0] == 200
        assert certificate_of(caller) == der(old)


async def figures(gateway: Gateway) -> dict[str, float]:
    """Metrics of the certificate."""
    page = (await get(gateway.admin_url, "/metrics"))[2].decode()
    lines = [line.split() for line in page.splitlines() if line.startswith("firsttoken_certificate_")]
    return {name.removeprefix("firsttoken_certificate_"): float(value) for name, value in lines}


def end_of(source: Certificates) -> float:
    shown = subprocess.run(
        ["openssl", "x509", "-enddate", "-noout", "-in", str(source.folder / "server.pem")],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(ssl.cert_time_to_seconds(shown.stdout.strip().removeprefix("notAfter=")))


async def test_the_end_of_the_certificate_and_a_renewal_that_fails_are_metrics(
    installed: Installed, old: Certificates, new: Certificates
) -> None:
    """The certificate in force counts: that of a pair that does not fit is not."""
    async with Upstream([JSON]) as upstream, secured(installed, upstream) as gateway:
        assert await figures(gateway) == {"end_timestamp_seconds": end_of(old), "refused": 0.0}
        installed.install(new, key=False)
        async with asyncio.timeout(NOTICED):
            while (found := await figures(gateway))["refused"] != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert found["end_timestamp_seconds"] == end_of(old)
        installed.install(new)
        async with asyncio.timeout(NOTICED):
            while (found := await figures(gateway))["refused"] != 0:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert found["end_timestamp_seconds"] == end_of(new)


async def test_files_that_do_not_fit_keep_the_previous_certificate(
    installed: Installed, old: Certificates, new: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate whose key comes later, junk, no file: each is logged once. The next pair that fits is taken."""

    def complaints() -> list[str]:
        return [record.getMessage() for record in caplog.records if "keeping the previous" in record.getMessage()]

    async with Upstream([JSON]) as upstream, secured(installed, upstream) as gateway:
        installed.install(new, key=False)
        await eventually(lambda: len(complaints()) == 1, NOTICED)
        assert await installed.presented(gateway.url) == der(old)
        installed.certificate.write_text("junk")
        await eventually(lambda: len(complaints()) == 2, NOTICED)
        assert await installed.presented(gateway.url) == der(old)
        installed.certificate.unlink()
        await eventually(lambda: len(complaints()) == 3, NOTICED)
        assert await installed.presented(gateway.url) == der(old)
        installed.install(new)
        await installed.until_presented(gateway.url, new)
    assert len(complaints()) == 3
    assert "the key is not that of the certificate" in complaints()[0]
    assert not any("PRIVATE" in record.getMessage() for record in caplog.records)


async def test_workers_renew_and_a_killed_one_comes_back_whatever_the_files(
    installed: Installed, old: Certificates, new: Certificates, tmp_path: Path
) -> None:
    """A worker inherits a certificate that works."""
    async with Upstream([JSON]) as upstream:
        config = tmp_path / "gateway.yaml"
        config.write_text(
            "server: {listen: 127.0.0.1:0, admin: 127.0.0.1:0, workers: 2, "
            f"tls: {{certificate: {installed.certificate}, key: {installed.key}}}}}\n"
            f"pools: {{only: {{backend: compatible, model: served, endpoints: [{upstream.url}]}}}}\n"
            "routes: {chat: {tiers: [only]}}\n"
        )
        async with serving(config) as served:
            assert served.url.startswith("https://")
            assert await installed.presented(served.url) == der(old)
            installed.install(new)
            found: list[bytes] = []
            async with asyncio.timeout(NOTICED):
                while set(found[-12:]) != {der(new)}:  # of both workers, but for one case in 2,000
                    found.append(await installed.presented(served.url))
                    await asyncio.sleep(0.05)
            installed.certificate.write_text("junk")
            killed = workers_of(served)[:2]
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            again = 0
            async with asyncio.timeout(60):
                while again < 2:
                    again += "is serving again" in await served.line()
            async with installed.calling(served.url) as caller:
                assert (await caller.whole(post(CHAT)))[0] == 200


SCENARIOS: list[Any] = [
    test_an_sdk_works_over_tls,
    test_refusals_arrive_whole,
    test_a_caller_that_leaves_ends_the_request_upstream,
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_both_event_loops_serve_tls_alike(scenario: Any, installed: Installed) -> None:
    """uvloop has a TLS implementation of its own; all other tests of one process run on asyncio's."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario(installed))


def test_uvloop_presents_a_renewed_certificate(installed: Installed, old: Certificates, new: Certificates) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test_a_renewed_certificate_meets_new_connections_and_leaves_the_old_alone(installed, old, new))


# --------------------------------------------------------------------------- firsttoken check


def checked(installed: Installed, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    config = installed.certificate.with_name("checked.yaml")
    config.write_text(
        f"server:\n  tls: {{certificate: {installed.certificate}, key: {installed.key}}}\n"
        "pools: {only: {backend: vllm, model: served, endpoints: [http://127.0.0.1:9]}}\n"
        "routes: {chat: {tiers: [only]}}\n"
    )
    code = main(["check", str(config)])
    return code, capsys.readouterr().err


def test_a_pair_that_fits_is_valid(installed: Installed, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(installed, capsys)[0] == 0


@pytest.mark.parametrize("wrong", ["mismatch", "junk", "swapped", "no file", "unreadable key", "passphrase"])
def test_files_that_cannot_be_used_are_errors_with_their_line(
    wrong: str, installed: Installed, new: Certificates, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, too where OpenSSL would ask for a passphrase on the terminal."""
    certificate, key = installed.certificate, installed.key
    expected = "not a PEM certificate and a PEM key without a passphrase"
    if wrong == "mismatch":
        installed.install(new, certificate=False)
        expected = "the key is not that of the certificate"
    elif wrong == "junk":
        certificate.write_text("junk")
    elif wrong == "swapped":
        texts = certificate.read_text(), key.read_text()
        key.write_text(texts[0])
        certificate.write_text(texts[1])
    elif wrong == "passphrase":
        os.system(f"openssl ec -in {key} -aes256 -passout pass:secret -out {key}.enc 2>/dev/null && mv {key}.enc {key}")
        assert "ENCRYPTED" in key.read_text()
    elif wrong == "no file":
        certificate.unlink()
        expected = f"certificate: '{certificate}' cannot be read: No such file or directory"
    else:
        key.unlink()
        key.mkdir()
        expected = f"key: '{key}' cannot be read: Is a directory"
    code, errors = checked(installed, capsys)
    assert code == 2
    assert "checked.yaml:2: server.tls: " in errors
    assert expected in errors
    assert "PRIVATE" not in errors
