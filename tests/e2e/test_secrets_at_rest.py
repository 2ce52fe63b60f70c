"""Configurations with secrets and mistakes: output of `check`, a start, a worker's death and a stop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.builders import calling, get
from tests.support.canaries import BACKEND, CACHE, CANARIES, POOL_HEADER, REDIS, canary_config, canary_request, leaks_in
from tests.support.forked import forked
from tests.support.gateways import document, pool
from tests.support.served import Served, serving
from tests.support.upstream import HANG, STREAM_HEAD, Upstream, chunk

LONG = f"{BACKEND}-{POOL_HEADER}"  # a key is long, without spaces
FINE = "pools: {p: {backend: vllm, model: m, endpoints: [http://127.0.0.1:9]}}\nroutes: {r: {tiers: [p]}}\n"

MISTAKES = {
    "an unknown key beside it": f"state: {{redis: redis://:{REDIS}@h/0, reddis: x}}",
    "under a misspelt name": f"pools: {{p: {{backend: openai, model: m, api_kee: {LONG}}}}}",
    "a list in its place": f"pools: {{p: {{backend: openai, model: m, api_key: [{LONG}]}}}}",
    "a key in place of its digest": f"keys: [{{name: a, sha256: {LONG}}}]",
    "a key in place of a mapping": f"keys: [{LONG}]",
    "a key in place of all keys": f"keys: {LONG}",
    "a key in place of a pool": f"pools: {{openai: {LONG}}}",
    "Redis in place of all state": f"state: redis://:{REDIS}@h/0",
    "Redis without its scheme": f"state: {{redis: ':{REDIS}@h/0'}}",
    "a cache secret that is too short": "state: {cache_secret: axolotl}",
    "a cache secret in a list": f"state: {{cache_secret: [{CACHE}]}}",
    "headers as text": f"pools: {{p: {{backend: openai, model: m, headers: 'authorization: {LONG}'}}}}",
    "a header of two lines": f'pools: {{p: {{backend: openai, model: m, headers: {{x-key: "a\\n{LONG}"}}}}}}',
    "credentials in a URL": f"pools: {{p: {{backend: vllm, model: m, endpoints: ['http://u:{LONG}@h']}}}}",
    "a key in a URL": f"pools: {{p: {{backend: vllm, model: m, endpoints: ['http://h/v1?key={LONG}']}}}}",
    "credentials in the address of events": "pools: {p: {backend: vllm, model: m, "
    f"endpoints: [{{url: 'http://h', kv_events: 'tcp://u:{LONG}@h:1'}}]}}}}",
    "credentials of the collector": f"telemetry: {{otlp: 'http://u:{LONG}@h:4318'}}",
    "a key of the collector": f"telemetry: {{otlp: 'http://h:4318/?key={LONG}'}}",
    "a password that YAML takes for an alias": f"state: {{redis: *{REDIS}}}",
    "a password that YAML takes for a tag": f"state: {{redis: !{REDIS} x}}",
    "a password that YAML takes for a tag's handle": f"state: {{redis: !{REDIS}!x y}}",
    "a password that YAML takes for an escape": f'state: {{redis: "\\q{REDIS}"}}',
    "a password with a reference in it": f"state: {{redis: 'redis://:${{{REDIS}-1}}@h/0'}}",
    "not closed": f"state: {{redis: 'redis://:{REDIS}@h/0",
    "given twice": f"state:\n  redis: redis://:{REDIS}@h/0\n  redis: redis://:{REDIS}@h/1\n",
    "a mistake elsewhere": f"pools: {{p: {{backend: openai, model: m, api_key: {LONG}, endpoints: []}}}}\n"
    f"state: {{redis: 'redis://:{REDIS}@h/0', cache_secret: {CACHE}}}\nroutes: {{r: {{tiers: [q]}}}}",
}


async def run(*arguments: str, **environ: str) -> tuple[int, str]:
    """Exit code and complete output."""
    process = await forked(*arguments, env={**os.environ, **environ})
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return await process.wait(), (out + err).decode()


def written(folder: Path, text: str) -> str:
    path = folder / "secret.yaml"
    path.write_text(text)
    return str(path)


def test_configuration_errors_quote_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mistake in a file of its own; the error states the line."""
    from gateway.cli.main import main

    for name, text in MISTAKES.items():
        assert main(["check", written(tmp_path, text)]) == 2, name
        output = "".join(capsys.readouterr())
        assert re.search(r"secret\.yaml:\d", output), name
        assert leaks_in(name, output) == []


async def test_an_invalid_file_at_start_gives_the_errors_of_check(tmp_path: Path) -> None:
    """A value from the environment is shown by the variable's name."""
    file = written(tmp_path, MISTAKES["a mistake elsewhere"])
    assert await run("serve", "--config", file) == (2, (await run("check", file))[1])
    file = written(tmp_path, FINE + "state: {redis: '${REDIS_URL}'}\nserver: {workers: '${REDIS_URL}'}\n")
    code, printed = await run("serve", "--config", file, REDIS_URL=f"redis:{REDIS}")
    assert (code, "${REDIS_URL}" in printed, leaks_in("serve", printed)) == (2, True, [])


async def test_check_prints_no_secret_of_a_valid_configuration(tmp_path: Path) -> None:
    """Neither does the schema."""
    text = FINE + f"state: {{redis: 'redis://:{REDIS}@h/0', cache_secret: {CACHE}}}\n"
    code, printed = await run("check", written(tmp_path, text))
    assert (code, leaks_in("check", printed)) == (0, [])


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_reloads_print_no_secret(workers: str, tmp_path: Path) -> None:
    """In the reply, the log and the pages of the admin port: for every mistake, and for changed secrets."""
    async with serving(Path(written(tmp_path, on_free_ports(FINE))), "--workers", workers) as served:
        output = ""
        for name, text in MISTAKES.items():
            written(tmp_path, text)
            status, answer = await reloaded(served)
            assert (status, bool(re.search(r"secret\.yaml:\d", answer))) == (400, True), name
            output += answer
            while "keeping the previous configuration" not in (line := await served.line()):
                assert line, "it has ended"
                output += line
        secret = on_free_ports(FINE).replace(
            "vllm", f"vllm, api_key: {BACKEND}, headers: {{x-pool-secret: {POOL_HEADER}}}"
        )
        for more in ("", f"state: {{redis: 'redis://:{REDIS}@127.0.0.1:1/0', cache_secret: {CACHE}}}\n"):
            written(tmp_path, secret + more)
            status, answer = await reloaded(served)
            assert (status, "pools.p" in answer or "state" in answer) == (200, True)
            output += answer
        for page in ("/config", "/fleet", "/metrics"):
            output += str(await get(served.admin, page))
        served.process.send_signal(signal.SIGTERM)
        code, out, err = await served.ends()
    assert code == 0
    assert "configuration reloaded (POST /reload)" in err
    assert leaks_in("the process", output + out + err) == []


def on_free_ports(text: str) -> str:
    """On free ports."""
    return "server: {listen: 127.0.0.1:0, admin: 127.0.0.1:0}\ntelemetry: {access_log: off}\n" + text


async def reloaded(served: Served) -> tuple[int, str]:
    async with calling(served.admin) as caller:
        status, headers, body = await caller.whole(
            b"POST /reload HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
        )
    return status, f"{headers} {body.decode()}"


def victim(pid: int) -> int:
    """Process id of a worker."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_worker_death_and_a_forced_stop_print_no_secret(workers: int, tmp_path: Path) -> None:
    """With a stream in progress."""
    async with Upstream([STREAM_HEAD + chunk(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'), HANG]) as upstream:
        config = document(
            {"only": pool(upstream.url, api_key=BACKEND, headers={"x-pool-secret": POOL_HEADER})},
            **canary_config(tmp_path, telemetry={"access_log": "stdout"}),
        )
        file = Path(written(tmp_path, json.dumps(config)))
        async with serving(file, "--workers", str(workers)) as served:
            log = served.first_line
            while not served.url:  # warnings come first
                log += await served.line()
                served = Served(served.process, log.splitlines()[-1])
            async with calling(served.url) as caller:
                assert (await caller.ask(canary_request(stream=True)))[0] == 200
                if workers > 1:
                    os.kill(victim(served.process.pid), signal.SIGKILL)
                    while "is serving again" not in log:
                        log += await served.line()
                    assert "restarting it" in log
                served.process.send_signal(signal.SIGTERM)
                while "draining" not in log:  # a line about Redis may come before
                    log += await served.line()
                served.process.send_signal(signal.SIGINT)  # force stop
                _, out, err = await served.ends()
        assert upstream.requests
        assert leaks_in("the process", log + out + err, CANARIES) == []
