"""Rows 35 to 43: keys, secrets, headers, tenants, redirects, log lines, series, and the admin port.

A row with an existing test file runs the file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE

import aiohttp

from benchmarks.processes import ROOT, child
from tests.programs.chaos.callers import ask, chat, post, quantile
from tests.programs.chaos.input import raw_status
from tests.programs.chaos.lab import Lab
from tests.programs.chaos.operation import cheap_engine
from tests.programs.chaos.overload import healthy
from tests.programs.chaos.rows import Result, row
from tests.support.builders import WHOLE
from tests.support.gateways import pool
from tests.support.upstream import Upstream, reply

KEY = "sk-chaos-0123456789abcdef"
KEYS = [{"name": "k", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]
WRONG_KEYS = {
    "none": "",
    "another": "Bearer sk-other",
    "a prefix": f"Bearer {KEY[:-1]}",
    "20 characters of it": f"Bearer {KEY[:20]}",
    "one more character": f"Bearer {KEY}x",
    "another case": f"Bearer {KEY.upper()}",
    "a NUL after it": f"Bearer {KEY}\0",
    "another scheme": f"Basic {KEY}",
    "no scheme": KEY,
    "its digest": f"Bearer {KEYS[0]['sha256']}",
    "15 KiB": f"Bearer {'k' * 15_000}",
    "64 KiB": f"Bearer {'k' * 65_536}",
    "empty": "Bearer ",
    "two keys": f"Bearer {KEY}, Bearer {KEY}",
}
ROUTES = (
    post(chat()),
    post(b'{"model":"chat","prompt":"x"}', path="/v1/completions"),
    b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n",
)


async def run_tests(*arguments: str) -> Result:
    """Run test files; the figure is pytest's last line."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=DEVNULL)
    out, _ = await process.communicate()
    lines = out.decode().strip().splitlines()
    return Result(lines[-1] if lines else "-", process.returncode == 0)


@row(
    35,
    "security",
    "wrong, cut and monstrous keys on every route",
    "401 (431 beyond the limit of a header), nothing upstream",
    quick=True,
)
async def wrong_keys(lab: Lab) -> Result:
    """Fourteen wrong keys on every protected route, and the right key as a control."""
    wrong = list[str]()
    async with (
        Upstream([reply(WHOLE)]) as upstream,
        lab.gateway({"only": pool(upstream.url)}, keys=KEYS, check=False) as gateway,
    ):
        for name, key in WRONG_KEYS.items():
            for raw in ROUTES:
                header = f"authorization: {key}\r\n".encode() if key else b""
                status = await raw_status(gateway.port, raw.replace(b"\r\n", b"\r\n" + header, 1))
                wrong += [] if status in (401, 400, 431) else [f"{name}: {status}"]
        reached = len(upstream.requests)
        right = await ask(gateway.port, chat(), {"authorization": f"Bearer {KEY}"})
    figures = f"{len(WRONG_KEYS) * len(ROUTES)} requests: {len(wrong)} not refused, {reached} upstream; "
    figures += f"the right key {right.status}"
    return Result(figures, not wrong and not reached and right.status == 200, "; ".join(wrong[:4]))


@row(35, "security", "1,000 hostile connections without a key", "memory +64 MB at most; p99 of other callers +10 ms")
async def hostile_connections(lab: Lab) -> Result:
    """Each connection acts every second: large bodies, 1-byte chunks, wrong keys, endless heads, no HTTP, nothing."""
    number, seconds = lab.size(1000, 200), float(lab.size(20, 3))
    key = {"authorization": f"Bearer {KEY}"}
    async with cheap_engine() as url, lab.gateway({"only": pool(url)}, keys=KEYS, check=False) as gateway:
        alone = await healthy(gateway, seconds, key)
        before = gateway.rss
        with child(
            [sys.executable, "-m", "tests.programs.chaos.hostile_connections", str(gateway.port), str(number)],
            gateway.port,
        ):
            await asyncio.sleep(4.0)
            beside = await healthy(gateway, seconds, key)
            grown = (gateway.rss - before) / 2**20
    p99, usual = (quantile([reply.total for reply in replies], 0.99) for replies in (beside, alone))
    lost = sum(not reply.completed for reply in beside)
    figures = f"memory {grown:+.0f} MB; {lost} of {len(beside)} other requests failed; "
    figures += f"p99 {p99 * 1e3:.1f} ms, without them {usual * 1e3:.1f} ms"
    return Result(figures, grown <= 64 and not lost and p99 <= usual + 0.01)


@row(37, "security", "canary keys and prompts in forty failures", "none in logs, metrics, traces, errors, Redis")
async def canaries(lab: Lab) -> Result:
    """tests/e2e/test_secrets.py, test_secrets_at_rest.py and test_secrets_shared.py."""
    return await run_tests(*(f"tests/e2e/test_secrets{name}.py" for name in ("", "_at_rest", "_shared")))


@row(38, "security", "headers in both directions", "an exact list passes")
async def headers(lab: Lab) -> Result:
    """tests/e2e/test_headers.py."""
    return await run_tests("tests/e2e/test_headers.py")


@row(39, "security", "two tenants and one prefix; a forged salt", "no shared cache; the same tenant hits")
async def tenants(lab: Lab) -> Result:
    """tests/e2e/test_isolation.py."""
    return await run_tests("tests/e2e/test_isolation.py")


@row(
    40,
    "security",
    "requests forged through body, header, redirect",
    "no connection but to configured endpoints",
    quick=True,
)
async def forged_requests(lab: Lab) -> Result:
    """URLs of a second server in the body and in headers, and the backend's redirects to the second server."""
    fields = dict.fromkeys(("api_base", "base_url", "url", "endpoint", "proxy", "webhook"), "URL")
    names = ("host", "x-forwarded-host", "x-api-base", "x-upstream", "x-target-url", "forwarded", "referer", "origin")
    async with Upstream([reply(b"secret")]) as trap:
        moved = [reply(b"", f"{code} Moved", f"location: {trap.url}/") for code in (301, 302, 307, 308)]
        async with (
            Upstream([moved[0]], [moved[1]], [moved[2]], [moved[3]], [reply(WHOLE)]) as upstream,
            lab.gateway({"only": pool(upstream.url)}, check=False) as gateway,
        ):
            body = chat(**dict.fromkeys(fields, trap.url))
            for headers_sent in ({}, *({name: trap.url} for name in names)):
                await ask(gateway.port, body, headers_sent)
            absolute = post(body).replace(b"/v1/", f"{trap.url}/v1/".encode(), 1)
            await raw_status(gateway.port, absolute)
        reached = trap.connections
    return Result(f"{reached} connections to the second server", not reached)


HOSTILE = ["a\r\nset-cookie: x=1", "a\nb", "\x1b[31mred", "line\u2028sep", "nul\x00", '"quoted"', "\\u0000", "a" * 5000]


@row(41, "security", "CR, LF, ANSI and U+2028 in ids and models", "one JSON line a request", quick=True)
async def log_injection(lab: Lab) -> Result:
    """Eight hostile texts as the model, the id and the user agent."""
    async with (
        Upstream([reply(WHOLE)]) as upstream,
        lab.gateway({"only": pool(upstream.url)}, passthrough="only", check=False) as gateway,
    ):
        for text in HOSTILE:
            await ask(gateway.port, chat(model=text))
            header = text.encode("utf-8", "replace").decode("latin-1").replace("\r", "").replace("\n", "")
            await ask(gateway.port, chat(), {"x-request-id": header, "user-agent": header})
        await asyncio.sleep(1.0)
        lines = (gateway.home / "access.jsonl").read_bytes().split(b"\n")[:-1]
    bad = [line for line in lines if not _is_clean(line)]
    return Result(
        f"{len(lines)} lines: {len(bad)} not one printable JSON object", not bad and len(lines) >= len(HOSTILE)
    )


def _is_clean(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return all(0x20 <= byte < 0x7F for byte in line)


@row(42, "security", "100,000 unknown models", "at most 1,000 series; memory flat", quick=True)
async def cardinality(lab: Lab) -> Result:
    """Every request names another model and another id, on a gateway with a passthrough and without keys."""
    number = lab.size(100_000, 1000)
    async with (
        Upstream([reply(WHOLE, "200 OK", "content-type: application/json")]) as upstream,
        lab.gateway({"only": pool(upstream.url)}, passthrough="only", check=False) as gateway,
    ):
        await _many_models(gateway.port, 0, number // 2)
        before, lines = gateway.rss, len((await gateway.admin_text("/metrics")).splitlines())
        await _many_models(gateway.port, number // 2, number)
        grown, after = (gateway.rss - before) / 1e6, len((await gateway.admin_text("/metrics")).splitlines())
    figures = f"{after} lines of metrics, {after - lines} more in the second half; memory +{grown:.1f} MB there"
    return Result(figures, after - lines <= 10 and grown <= 10)


async def _many_models(port: int, first: int, last: int) -> None:
    """Over 16 kept connections."""
    numbers = iter(range(first, last))

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            writer.write(post(chat(model=f"model-{number}"), {"x-request-id": f"id-{number}"}))
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
        writer.close()

    await asyncio.gather(*(one() for _ in range(16)))


ADMIN = ("/metrics", "/dashboard", "/requests", "/routes", "/fleet", "/config", "/explain", "/reload", "/ttft")


@row(43, "security", "admin paths on the data port", "404", quick=True)
async def admin_on_data_port(lab: Lab) -> Result:
    """Every path of the admin port, GET and POST."""
    wrong = list[str]()
    async with lab.gateway({"only": pool("http://127.0.0.1:9")}, check=False) as gateway:
        for path in ADMIN:
            for method in ("GET", "POST"):
                raw = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode()
                status = await raw_status(gateway.port, raw)
                wrong += [] if status == 404 else [f"{method} {path}: {status}"]
    return Result(f"{2 * len(ADMIN)} requests: {len(wrong)} answered", not wrong, "; ".join(wrong[:4]))


@row(
    43,
    "security",
    "a page in a browser that talks to the admin port",
    "a foreign Host or Origin is refused",
    quick=True,
)
async def foreign_origin(lab: Lab) -> Result:
    """DNS rebinding and cross-site requests: reads with a foreign Host, changes with a foreign Origin."""
    let_in = list[str]()
    async with (
        lab.gateway({"only": pool("http://127.0.0.1:9")}, check=False) as gateway,
        aiohttp.ClientSession() as session,
    ):
        for method, path, name, value in (
            ("GET", "/config", "Host", "evil.example"),
            ("GET", "/requests", "Host", "evil.example:9090"),
            ("POST", "/reload", "Origin", "http://evil.example"),
            ("POST", "/explain", "Origin", "null"),
            ("POST", "/ttft", "Host", "evil.example"),
        ):
            async with session.request(method, gateway.admin + path, headers={name: value}, data=b"{}") as got:
                let_in += (
                    [f"{method} {path} with {name}: {value} got {got.status}"] if got.status not in (403, 421) else []
                )
    return Result(f"{5 - len(let_in)} of 5 refused", not let_in, "; ".join(let_in[:3]))
