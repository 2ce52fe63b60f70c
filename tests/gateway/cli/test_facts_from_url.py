"""`firsttoken facts update --from URL`: each failure of a server is one sentence, exit code 2, and no change."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from backends.facts import refreshed
from backends.facts.fact_checks import LARGEST
from backends.facts.fact_rows import MODELS, shipped
from gateway.cli import facts_command
from gateway.cli.main import main
from tests.backends.facts.test_refreshed import newer
from tests.support.certificates import made
from tests.support.upstream import CLOSE, HANG, RESET, Pause, Script, Upstream

TEXT = newer()
DIGEST = "sha256:" + hashlib.sha256(TEXT).hexdigest()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
WHOLE = HEAD % len(TEXT) + TEXT


@pytest.fixture(autouse=True)
def shipped_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(refreshed, "_today", lambda: shipped(MODELS)["read"] + timedelta(30))
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield
    refreshed.use({})


def to(location: str) -> bytes:
    return b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\nlocation: %s\r\n\r\n" % location.encode()


async def updated(folder: Path, capsys: pytest.CaptureFixture[str], url: str) -> tuple[int, str]:
    config = folder / "f.yaml"
    config.write_text(
        f"state: {{dir: {folder / 'state'}}}\n"
        "pools: {a: {backend: vllm, model: m, endpoints: ['http://127.0.0.1:9']}}\n"
        "routes: {r: {tiers: [a], ttft: off}}\n"
    )
    arguments = ["facts", "update", "--from", url, "--digest", DIGEST, "--config", str(config)]
    code = await asyncio.to_thread(main, arguments, [])
    said = capsys.readouterr()
    return code, said.out + said.err


async def test_a_file_of_a_url_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind a redirect, too: its digest vouches for it."""
    async with Upstream([to("/there"), CLOSE], [WHOLE, CLOSE]) as server:
        code, text = await updated(tmp_path, capsys, f"{server.url}/models.yaml".replace("http", "HTTP", 1))
        assert [each.target for each in server.requests] == ["/models.yaml", "/there"]
    assert (code, text.splitlines()[1]) == (0, "added: openai gpt-{v}-vega since 7")
    assert (tmp_path / "state" / "facts-models.yaml").read_bytes() == TEXT


FAILURES: dict[str, tuple[Script, str]] = {
    "not found": ([b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", CLOSE], "HTTP Error 404: Not Found"),
    "cut": ([HEAD % len(TEXT) + TEXT[:100], CLOSE], "the answer ended before its end"),
    "cut chunks": ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc", CLOSE], "ended before its end"),
    "no chunks": ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", CLOSE], "ended before its end"),
    "no HTTP": ([b"\xff\x00garbage\x1b[2J\r\n\r\n", CLOSE], "garbage"),
    "closed": ([CLOSE], "without response"),
    "reset": ([HEAD % 9, RESET], "reset by peer"),
    "silent": ([HANG], "no whole answer within 0.5 s"),
    "dripping": ([HEAD % 100, *[b"x", Pause(0.1)] * 100, HANG], "no whole answer within 0.5 s"),
    "a loop": ([to("/again"), CLOSE], "infinite loop"),
    "to nowhere": ([to("http://[::1/x"), CLOSE], "Invalid IPv6 URL"),
    "to a bad port": ([to("http://127.0.0.1:port/x"), CLOSE], "port"),
    "to a file": ([to("file:///etc/passwd"), CLOSE], "not allowed"),
    "large": ([HEAD % (LARGEST + 1) + bytes(LARGEST + 1), CLOSE], "longer than 4 MB"),
    "another": ([HEAD % 2 + b"{}", CLOSE], "its digest is sha256:"),
}


@pytest.mark.parametrize(("script", "words"), FAILURES.values(), ids=FAILURES)
async def test_each_failure_is_one_sentence(
    script: Script, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the URL before it, and without what a terminal obeys."""
    monkeypatch.setattr(facts_command, "PATIENCE", 0.5)
    async with Upstream(script) as server:
        code, text = await updated(tmp_path, capsys, server.url)
    assert (code, text.count("\n"), text.startswith(f"{server.url}: ")) == (2, 1, True), text
    assert words in text
    assert "is kept" in text
    assert "\x1b" not in text
    assert not (tmp_path / "state").exists()


async def test_a_certificate_of_nobody_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificates = await asyncio.to_thread(made, tmp_path / "tls")
    async with Upstream([WHOLE, CLOSE], tls=certificates.serving()) as server:
        code, text = await updated(tmp_path, capsys, server.url)
    assert (code, text.count("\n"), "certificate verify failed" in text) == (2, 1, True), text


@pytest.mark.parametrize(
    "url", ["http://", "http://a b/", "http://127.0.0.1:1/", "https://127.0.0.1:port/", "http://é\x01/"]
)
async def test_a_url_that_leads_nowhere_is_one_sentence(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = await updated(tmp_path, capsys, url)
    assert (code, text.count("\n")) == (2, 1), text
