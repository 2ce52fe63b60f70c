"""Reloads while requests run, queue and arrive: no request is lost, and none sees a partial configuration."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.facts import refreshed
from backends.facts.fact_rows import MODELS
from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.record import RequestOutcome
from tests.backends.facts.test_refreshed import newer
from tests.e2e.test_anthropic import COMPLETION, whole
from tests.support.builders import ANSWER, CHAT, DONE, FINISH, STREAMED, TOKEN, Caller, calling, get, last, post
from tests.support.gateways import document, pool, running
from tests.support.served import Served, serving, write_config
from tests.support.simulated import eventually
from tests.support.upstream import GATE, HANG, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

STREAM = {**CHAT, "stream": True}
SLOW: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]
RELOAD = b"POST /reload HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"


def configured(pools: dict[str, Any], routes: dict[str, Any] | None = None, **more: Any) -> Config:
    return Config.model_validate(document(pools, routes, **more))


async def answer(gateway: Gateway, **more: Any) -> tuple[int, str]:
    """Status, and the answering endpoint."""
    async with calling(gateway.url) as caller:
        status, _ = await caller.ask(post({**STREAM, **more}))
        if status == 200:
            await caller.chunks()
    return status, last(gateway).endpoint.id


async def rest(caller: Caller) -> bytes:
    return b"".join(await caller.chunks())


# --------------------------------------------------------------------------- running requests


async def test_a_stream_completes_on_an_endpoint_that_a_reload_removed() -> None:
    """The connection closes after the stream, not before; the next request goes to the new endpoint."""
    async with Upstream(SLOW) as old, Upstream([STREAMED]) as new, running({"only": pool(old.url)}) as gateway:
        [way] = gateway.runtime.current.upstreams.values()
        async with calling(gateway.url) as caller:
            assert (await caller.ask(post(STREAM)))[0] == 200
            await gateway.apply_config(configured({"only": pool(new.url)}))
            assert (await answer(gateway))[1] == f"only/{new.url.removeprefix('http://')}"
            assert way.connections.active == 1
            old.proceed()
            assert await rest(caller) == TOKEN + FINISH + DONE
        await eventually(lambda: way.connections.active + way.connections.idle == 0)
        assert last(gateway).end is RequestOutcome.COMPLETED


async def test_a_request_keeps_its_candidates_over_a_reload() -> None:
    """After a failure a removed endpoint is still reachable, and no request ends in a 500."""
    reset: Script = [GATE, b"HTTP/1.1 503 x\r\ncontent-length: 0\r\n\r\n"]
    async with Upstream(reset) as first, Upstream([STREAMED]) as second, Upstream([STREAMED]) as third:
        routes = {"chat": {"tiers": ["a", "b"], "scorer": "round_robin"}}
        async with running({"a": pool(first.url), "b": pool(second.url)}, routes) as gateway:
            async with calling(gateway.url) as caller:
                asking = asyncio.create_task(caller.ask(post(STREAM)))
                await first.until(lambda seen: len(seen.requests) == 1)
                await gateway.apply_config(configured({"c": pool(third.url)}))
                first.proceed()
                assert (await asking)[0] == 200
                await caller.chunks()
            record = last(gateway)
            assert (record.end, record.endpoint.pool, len(record.attempts)) == (RequestOutcome.COMPLETED, "b", 2)
            assert gateway.monitor.loads().keys() == {f"c/{third.url.removeprefix('http://')}"}


async def test_a_reload_keeps_the_learned_state_of_remaining_endpoints() -> None:
    """Predictions and connections stay; a new endpoint starts without learned state."""
    async with (
        Upstream([STREAMED]) as stays,
        Upstream([STREAMED]) as joins,
        running({"only": pool(stays.url)}) as gateway,
    ):
        await answer(gateway)
        [known] = gateway.monitor.loads()
        samples = gateway.monitor.fleet.view.statistics(known, 1e9).samples
        await gateway.apply_config(configured({"only": pool(stays.url, joins.url, price={"input": 1.0})}))
        assert samples == gateway.monitor.fleet.view.statistics(known, 1e9).samples == 1
        assert gateway.runtime.current.upstreams[known].connections.idle == 1
        assert len(gateway.monitor.loads()) == 2


LONG = {**STREAM, "messages": [{"role": "user", "content": "word " * 20_000}]}
MESSAGE = b"".join(
    b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event).encode())
    for event in (
        {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 1, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    )
)


def engine(upstream: Upstream, **more: Any) -> dict[str, Any]:
    return {"backend": "vllm", "model": "m", "endpoints": [upstream.url], **more}


@asynccontextmanager
async def one_queued(
    busy: Upstream, pools: dict[str, Any], routes: dict[str, Any]
) -> AsyncIterator[tuple[Gateway, Caller, asyncio.Task[tuple[int, dict[str, str]]]]]:
    """A gateway with a request in progress at `busy`, and another that waits in the queue of route `chat`."""
    async with running(pools, routes) as gateway, calling(gateway.url) as one, calling(gateway.url) as two:
        first = asyncio.create_task(one.ask(post(LONG)))
        await busy.until(lambda seen: any(request.method == "POST" for request in seen.requests))
        queued = asyncio.create_task(two.ask(post(STREAM)))
        await eventually(lambda: gateway.queue.depth() == {"chat": 1})
        yield gateway, two, queued
        for _ in busy.requests:  # scrapes included
            busy.proceed()
        assert (await first)[0] == 200
        assert await rest(one) == TOKEN + FINISH + DONE


async def test_a_request_queued_for_a_removed_route_is_answered_404_at_once() -> None:
    """As the next request for the model, and without waiting for a time limit."""
    async with Upstream([GATE, STREAMED]) as busy, Upstream([STREAMED]) as free:
        pools = {"a": engine(busy), "b": pool(free.url)}
        routes = {"chat": {"workload": "batch", "tiers": ["a"]}, "other": {"tiers": ["b"]}}
        async with one_queued(busy, pools, routes) as (gateway, _, queued):
            await gateway.apply_config(configured({"b": pools["b"]}, {"other": routes["other"]}))
            assert (await queued)[0] == 404
            assert last(gateway).end is RequestOutcome.REFUSED
            assert (await answer(gateway))[0] == 404
            assert (await answer(gateway, model="other"))[0] == 200


@pytest.mark.parametrize(
    ("kept", "backend", "target", "answered"),
    [
        (False, "vllm", "/v1/chat/completions", ANSWER),
        (True, "vllm", "/v1/chat/completions", ANSWER),
        (True, "anthropic", "/v1/messages", MESSAGE),
    ],
    ids=["the pool has another name", "the route has another pool", "the new pool speaks another dialect"],
)
async def test_a_queued_request_is_decided_again_by_the_new_route_of_the_same_name(
    kept: bool, backend: str, target: str, answered: bytes
) -> None:
    """With an estimate and a body for its pools, and with its budget in the Record."""
    async with Upstream([GATE, STREAMED]) as busy, Upstream([STREAM_HEAD + chunk(answered) + LAST_CHUNK]) as free:
        old, new = {"a": engine(busy)}, {"b": engine(free, backend=backend, api_key="sk-backend")}
        async with one_queued(busy, old, {"chat": {"workload": "batch", "tiers": ["a"]}}) as (gateway, caller, queued):
            wanted = {"chat": {"workload": "batch", "ttft": {"budget": "50s"}, "tiers": ["b"]}}
            await gateway.apply_config(configured({**old, **new} if kept else new, wanted))
            assert (await queued)[0] == 200
            assert b'"hi"' in await rest(caller)
            record = last(gateway)
            assert (record.endpoint.pool, record.budgets.ttft, record.end) == ("b", 50.0, RequestOutcome.COMPLETED)
            assert sum(record.held.values()) > 0, "before the reload"
            assert {request.target for request in free.requests if request.method == "POST"} == {target}


async def test_a_reload_that_keeps_a_route_and_its_pools_leaves_the_queue_alone() -> None:
    """Nothing is estimated again, as with a change of DNS addresses."""
    async with Upstream([GATE, STREAMED]) as busy, Upstream([STREAMED]) as free:
        routes = {"chat": {"workload": "batch", "tiers": ["a"]}}
        async with one_queued(busy, {"a": engine(busy)}, routes) as (gateway, _, queued):
            [waiter] = gateway.queue._waiters.values()
            await gateway.apply_config(configured({"a": engine(busy), "b": pool(free.url)}, routes))
            assert [*gateway.queue._waiters.values()] == [waiter]
            queued.cancel()


async def test_routes_keys_and_budgets_change_with_the_next_request() -> None:
    """A removed key is refused; a new budget becomes a bucket of the histogram."""
    key = {"name": "app", "sha256": "0" * 64}
    async with Upstream([STREAMED]) as upstream, running({"only": pool(upstream.url)}) as gateway:
        assert (await answer(gateway))[0] == 200
        routes = {"chat": {"tiers": ["only"], "ttft": {"budget": "777ms"}}}
        await gateway.apply_config(configured({"only": pool(upstream.url)}, routes, keys=[key]))
        assert (await answer(gateway))[0] == 401
        await gateway.apply_config(configured({"only": pool(upstream.url)}, routes, defaults={"max_body": 10}))
        assert (await answer(gateway))[0] == 413
        await gateway.apply_config(configured({"only": pool(upstream.url)}, routes))
        assert (await answer(gateway))[0] == 200
        assert last(gateway).budgets.ttft == pytest.approx(0.777)
        page = (await get(gateway.admin_url, "/metrics"))[2].decode()
        assert 'firsttoken_ttft_seconds_bucket{le="0.777",pool="only",route="chat"} 2.0' in page
        assert pytest.approx(0.777) in gateway.admin.on_screen.bounds
        assert json.loads((await get(gateway.admin_url, "/config"))[2])["routes"]["chat"]["ttft"]["budget"] == 0.777


async def test_a_queued_passthrough_request_keeps_its_model_over_a_reload() -> None:
    """The forwarded model is the caller's, not the pool's."""
    async with Upstream([GATE, STREAMED]) as upstream:
        pools = {"a": {"backend": "vllm", "endpoints": [upstream.url]}}
        config = {"routes": {}, "passthrough": "a"}
        async with running(pools, **config) as gateway, calling(gateway.url) as one, calling(gateway.url) as two:
            long = {**STREAM, "model": "first", "messages": [{"role": "user", "content": "word " * 20_000}]}
            asking = [asyncio.create_task(one.ask(post(long)))]
            await upstream.until(lambda seen: any(request.method == "POST" for request in seen.requests))
            asking.append(asyncio.create_task(two.ask(post({**STREAM, "model": "second"}))))
            await eventually(lambda: gateway.queue.depth() == {"passthrough": 1})
            await gateway.apply_config(configured(pools, **config, defaults={"stream_idle": "31s"}))
            for _ in range(10):
                upstream.proceed()
            assert [status for status, _ in await asyncio.gather(*asking)] == [200, 200]
    sent = [json.loads(request.body)["model"] for request in upstream.requests if request.method == "POST"]
    assert sent == ["first", "second"]


async def test_keep_warm_requests_to_a_removed_endpoint_are_cancelled() -> None:
    """No component needs the answers."""
    async with Upstream([HANG]) as upstream, Upstream([STREAMED]) as other:
        warm = pool(upstream.url, keep_warm={"idle": "10ms"})
        async with running({"only": warm}) as gateway:
            await upstream.until(lambda seen: len(seen.requests) == 1)
            await gateway.apply_config(configured({"only": pool(other.url)}))
            await upstream.until(lambda seen: seen.hangups == 1)
            assert (await answer(gateway))[0] == 200


# --------------------------------------------------------------------------- triggers


async def wait_for_log(served: Served, text: str) -> None:
    """Reads standard error up to a line with `text`."""
    while text not in (line := await served.line()):
        assert line, f"ended without {text!r}"


async def reload(served: Served) -> tuple[int, Any]:
    async with calling(served.admin) as caller:
        status, _, body = await caller.whole(RELOAD)
    return status, json.loads(body)


async def status_of(served: Served, **more: Any) -> int:
    async with calling(served.url) as caller:
        status, _ = await caller.ask(post({**STREAM, **more}))
        if status == 200:
            await caller.chunks()
    return status


async def test_post_reload_answers_with_the_changes_or_the_errors_of_check(tmp_path: Path) -> None:
    """An invalid file leaves the old configuration in force and is logged; a valid one is applied."""
    async with Upstream([STREAMED]) as upstream:
        config = write_config(tmp_path / "f.yaml", upstream.url)
        text = config.read_text()
        async with serving(config) as served:
            assert await reload(served) == (200, {"result": "unchanged", "changed": [], "restart": []})
            await wait_for_log(served, "no changes")
            config.write_text(text.replace("tiers: [only]", "tiers: [onyl]"))
            line = f"{config}:3: routes.chat.tiers[0]: no pool 'onyl'; did you mean 'only'?"
            status, body = await reload(served)
            assert (status, body["error"]["message"], body["error"]["code"]) == (400, line, "invalid_config")
            await wait_for_log(served, "reload refused (POST /reload), keeping the previous configuration:")
            await wait_for_log(served, line)
            assert await status_of(served) == 200
            config.write_text(text.replace("chat:", "talk:").replace("{listen:", "{workers: 4, listen:"))
            assert await reload(served) == (
                200,
                {"result": "applied", "changed": ["routes.chat", "routes.talk"], "restart": ["server.workers"]},
            )
            await wait_for_log(served, "configuration reloaded (POST /reload): routes.chat, routes.talk")
            await wait_for_log(served, "need a restart to take effect: server.workers")
            assert (await status_of(served), await status_of(served, model="talk")) == (404, 200)
            page = (await get(served.admin, "/metrics"))[2].decode()
            assert 'firsttoken_config_reloads_total{result="applied"} 2.0' in page
            assert 'firsttoken_config_reloads_total{result="refused"} 1.0' in page
            assert "firsttoken_config_loaded_timestamp_seconds 1." in page


async def test_a_changed_file_and_sighup_reload(tmp_path: Path) -> None:
    """As in Kubernetes: the file is a link into a directory that is replaced. Errors are logged once."""
    async with Upstream([STREAMED]) as upstream:
        text = write_config(tmp_path / "f.yaml", upstream.url).read_text()
        for version, name in (("one", "chat"), ("two", "talk")):
            (tmp_path / version).mkdir()
            (tmp_path / version / "f.yaml").write_text(text.replace("chat:", f"{name}:"))
        (tmp_path / "data").symlink_to("one")
        (tmp_path / "link.yaml").symlink_to("data/f.yaml")
        async with serving(tmp_path / "link.yaml") as served:
            (tmp_path / "next").symlink_to("two")
            os.replace(tmp_path / "next", tmp_path / "data")
            await wait_for_log(served, "configuration reloaded (a file changed): routes.chat, routes.talk")
            assert await status_of(served, model="talk") == 200
            (tmp_path / "two" / "f.yaml").write_text("pools: [")
            await wait_for_log(served, "reload refused (a file changed)")
            await wait_for_log(served, "not YAML")
            (tmp_path / "two" / "f.yaml").write_text(text)
            served.process.send_signal(signal.SIGHUP)
            await wait_for_log(served, "configuration reloaded (SIGHUP): routes.talk, routes.chat")
            assert await status_of(served) == 200


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_sighup_opens_the_access_log_again(workers: str, tmp_path: Path) -> None:
    """As `logrotate` expects: every request is in one of the two files, the later ones in the new one."""
    path, renamed = tmp_path / "access.jsonl", tmp_path / "access.jsonl.1"
    async with Upstream([STREAMED]) as upstream:
        config = write_config(tmp_path / "f.yaml", upstream.url)
        config.write_text(config.read_text().replace("access_log: stdout", f"access_log: {path}"))
        async with serving(config, "--workers", workers) as served:
            before = [await status_of(served) for _ in range(10)]
            path.rename(renamed)
            served.process.send_signal(signal.SIGHUP)
            await wait_for_log(served, "configuration reloaded (SIGHUP): no changes")
            await eventually(path.exists)
            after = [await status_of(served) for _ in range(20)]
            served.process.terminate()
            assert (await served.ends())[0] == 0
    assert {*before, *after} == {200}
    old, new = ([json.loads(line) for line in file.read_text().splitlines()] for file in (renamed, path))
    assert len(old) + len(new) == len(before) + len(after)
    assert len(new) == len(after) if workers == "1" else new


# --------------------------------------------------------------------------- several workers


def children(served: Served) -> list[int]:
    pid = served.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def until_all_workers(ask: Callable[[], Awaitable[int]]) -> None:
    """Waits until all workers serve the configuration: the log is written before."""
    async with asyncio.timeout(30):
        while {await ask() for _ in range(8)} != {200}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_reload_reaches_all_workers_and_later_ones(tmp_path: Path) -> None:
    """The answer follows when all have applied it; an invalid file changes no worker; endpoints come and go."""
    async with Upstream([STREAMED]) as old, Upstream([STREAMED]) as new:
        config = write_config(tmp_path / "f.yaml", old.url)
        text = config.read_text()
        async with serving(config, "--workers", "2") as served:
            config.write_text(text.replace("tiers: [only]", "tiers: [onyl]"))
            status, body = await reload(served)
            assert (status, body["error"]["code"]) == (400, "invalid_config")
            assert [await status_of(served) for _ in range(12)] == [200] * 12
            config.write_text(text.replace("chat:", "talk:").replace(old.url, new.url))
            status, body = await reload(served)
            assert (status, body["result"]) == (200, "applied")
            assert body["changed"] == ["pools.only.endpoints", "routes.chat", "routes.talk"]
            assert [await status_of(served) for _ in range(12)] == [404] * 12
            assert [await status_of(served, model="talk") for _ in range(12)] == [200] * 12
            assert (len(old.requests), len(new.requests)) == (12, 12)
            assert [*json.loads((await get(served.admin, "/config"))[2])["routes"]] == ["talk"]
            os.kill(children(served)[0], signal.SIGKILL)
            await wait_for_log(served, "worker 1 is serving again")
            assert [await status_of(served, model="talk") for _ in range(12)] == [200] * 12
            page = (await get(served.admin, "/metrics"))[2].decode()
            assert 'firsttoken_config_reloads_total{result="applied"} 1.0' in page
            assert 'firsttoken_config_reloads_total{result="refused"} 1.0' in page


async def test_workers_reload_on_sighup_of_the_supervisor_and_on_a_changed_file(tmp_path: Path) -> None:
    """A closing terminal signals all processes of a service: workers ignore SIGHUP."""
    async with Upstream([STREAMED]) as upstream:
        config = write_config(tmp_path / "f.yaml", upstream.url)
        text = config.read_text()
        async with serving(config, "--workers", "2") as served:
            for child in children(served):
                os.kill(child, signal.SIGHUP)
            config.write_text(text.replace("chat:", "talk:"))
            await wait_for_log(served, "configuration reloaded (a file changed): routes.chat, routes.talk")
            await until_all_workers(lambda: status_of(served, model="talk"))
            config.write_text(text)
            served.process.send_signal(signal.SIGHUP)
            await wait_for_log(served, "configuration reloaded (SIGHUP): routes.talk, routes.chat")
            await until_all_workers(lambda: status_of(served))


@pytest.mark.parametrize("options", [(), ("--workers", "2")])
async def test_newer_facts_hold_after_a_reload_in_every_process(options: tuple[str, ...], tmp_path: Path) -> None:
    """Each has its own tables of facts."""
    state, config = tmp_path / "state", tmp_path / "f.yaml"
    state.mkdir()
    async with Upstream(*[whole(COMPLETION)] * 20) as upstream:
        pools = {name: pool(upstream.url, backend="openai", model="gpt-7-vega", api_key=name) for name in "ab"}
        settings = document(pools, state={"dir": str(state)})
        config.write_text(json.dumps(settings))
        async with serving(config, *options) as served:

            async def asked_effort() -> str:
                before = len(upstream.requests)
                async with calling(served.url) as caller:
                    assert (await caller.whole(post({**CHAT, "reasoning_effort": "high"})))[0] == 200
                efforts = [json.loads(each.body).get("reasoning_effort") for each in upstream.requests[before:]]
                return str(efforts[-1])

            assert await asked_effort() == "high"
            refreshed.path_of(state, MODELS).write_bytes(newer())
            async with calling(served.admin) as caller:
                assert (await caller.whole(RELOAD))[0] == 200
            assert {await asked_effort() for _ in range(6)} == {"low"}
