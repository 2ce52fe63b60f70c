"""A collector may do what it likes: requests do not notice, memory is bounded, and what was lost is counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from gateway.app import Gateway
from gateway.observe.otel import otlp
from gateway.observe.otel.otlp import asked
from gateway.observe.otel.telemetry import BATCH, Telemetry
from gateway.observe.otel.trace_context import Tracer
from tests.gateway.builders import CHAT, STREAMED, calling, get, post, record
from tests.gateway.upstream.dispatching import dead_url
from tests.support.collector import Collector
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, Pause, Upstream

TRACER = Tracer(1.0)


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are the shortest that still are waits; metrics are another's story."""
    for name, value in (("LINGER", 0.01), ("FIRST_WAIT", 0.01), ("LONGEST_WAIT", 0.05), ("TIMEOUT", 0.2)):
        monkeypatch.setattr(otlp, name, value)
    monkeypatch.setattr(otlp, "CLOSING", 0.5)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")


@asynccontextmanager
async def telling(url: str) -> AsyncIterator[Telemetry]:
    telemetry = Telemetry(url, {})
    telemetry.start()
    try:
        yield telemetry
    finally:
        await telemetry.close()


def tell(telemetry: Telemetry, count: int = 1) -> None:
    """Records, each of one span."""
    for _ in range(count):
        telemetry(record(trace=TRACER.trace({})))


def counts(telemetry: Telemetry) -> tuple[int, int]:
    """Spans that were exported, and lost."""
    exported, lost = (family.samples[0].value for family in telemetry.collect())
    return int(exported), int(lost)


@asynccontextmanager
async def serving(collector_url: str) -> AsyncIterator[Gateway]:
    telemetry = {"access_log": "off", "otlp": collector_url}
    async with (
        Upstream([STREAMED]) as upstream,
        running({"only": pool(upstream.url)}, telemetry=telemetry) as gateway,
    ):
        yield gateway


async def served(gateway: Gateway, count: int = 10) -> bool:
    """Whether requests are answered, to their ends."""
    for _ in range(count):
        async with asyncio.timeout(5), calling(gateway.url) as caller:
            if (await caller.ask(post({**CHAT, "stream": True})))[0] != 200 or not await caller.chunks():
                return False
    return True


async def test_all_that_was_told_is_taken_and_counted() -> None:
    """In batches; the last of them when it is closed."""
    async with Collector() as collector:
        async with telling(collector.url) as telemetry:
            tell(telemetry, 10 * BATCH + 1)
        assert len(await collector.requests(10 * BATCH + 1)) == 10 * BATCH + 1
        assert collector.asked < 10
        assert counts(telemetry) == (10 * BATCH + 1, 0)


MISFORTUNES = ["refuses", "hangs", "drips its head", "drips its body", "answers 500", "answers 503", "hangs up"]


@asynccontextmanager
async def unlucky(what: str) -> AsyncIterator[str]:
    """The URL of a collector that does so."""
    if what == "refuses":
        yield dead_url()
    elif what in ("drips its head", "hangs up"):
        script = [CLOSE] if what == "hangs up" else [b"HTTP/1.1 2", *[Pause(0.05), b"0"] * 200]
        async with Upstream(script) as upstream:
            yield upstream.url
    else:
        async with Collector() as collector:
            collector.hanging, collector.dripping = what == "hangs", what == "drips its body"
            collector.status = {"answers 500": 500, "answers 503": 503}.get(what, 200)
            yield collector.url


@pytest.mark.parametrize("misfortune", MISFORTUNES)
async def test_no_request_fails_and_the_end_is_not_held_up(misfortune: str) -> None:
    """Whatever it does. Its spans are the only loss (a body that drips comes after a head that said yes)."""
    async with unlucky(misfortune) as url:
        async with serving(url) as gateway:
            assert await served(gateway)
            assert gateway.telemetry is not None
            began = monotonic()
            await gateway.stop()
            assert monotonic() - began < 2.0
        exported, lost = counts(gateway.telemetry)
    assert exported + lost == 10 * 13  # the request, its attempt, all stages but failover
    if misfortune != "drips its body":
        assert exported == 0


async def test_a_batch_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has had its time; what it held is counted."""
    monkeypatch.setattr(otlp, "TIMEOUT", 30.0)
    async with Collector() as collector:
        collector.hanging = True
        async with telling(collector.url) as telemetry:
            tell(telemetry, 3)
            telemetry.flush()
            await eventually(lambda: collector.asked == 1)
            tell(telemetry, 2)
            began = monotonic()
        assert monotonic() - began < 5.0
        assert counts(telemetry) == (0, 5)


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it spans are not even made; they are counted as lost."""
    monkeypatch.setattr(otlp, "QUEUE", 20_000)
    async with telling(dead_url()) as telemetry:
        tell(telemetry, 4000)
        telemetry.flush()
        queue = telemetry._queue
        assert queue is not None
        assert 20_000 <= queue._bytes < 20_000 + 4000
        _, lost = counts(telemetry)
        assert lost == 4000 - queue._spans > 3000
    assert counts(telemetry) == (0, 4000)


async def test_it_comes_back_by_itself_and_the_log_says_so_once_each(caplog: pytest.LogCaptureFixture) -> None:
    """Gone, back, gone and back: four lines, and what waited meanwhile arrives."""
    with caplog.at_level(logging.INFO, "firsttoken"):
        async with Collector() as collector, telling(collector.url) as telemetry:
            for outage in range(1, 3):
                await collector.stop()
                tell(telemetry, 5)
                await eventually(lambda outage=outage: len(caplog.records) == 2 * outage - 1)
                await asyncio.sleep(0.1)  # several tries
                await collector.start()
                await collector.requests(5 * outage)
                await eventually(lambda outage=outage: len(caplog.records) == 2 * outage)
            await eventually(lambda: counts(telemetry) == (10, 0))
    lines = [entry.message for entry in caplog.records]
    assert lines[0].startswith(f"the collector at {collector.url}/v1/traces does not take spans: ")
    assert lines[1] == f"the collector at {collector.url}/v1/traces takes spans again; 0 were lost"
    assert [line.partition(": ")[0] for line in lines[2:]] == [line.partition(": ")[0] for line in lines[:2]]


async def test_what_may_work_later_is_tried_again_and_nothing_else() -> None:
    """429, 502, 503 and 504, as the OTLP specification has it."""
    for status, again in ((429, True), (502, True), (503, True), (504, True), (400, False), (401, False), (500, False)):
        async with Collector() as collector, telling(collector.url) as telemetry:
            collector.status = status
            tell(telemetry)
            await eventually(lambda again=again: collector.asked >= (3 if again else 1))
            if not again:
                await eventually(lambda: counts(telemetry) == (0, 1))
            collector.status = 200
            tell(telemetry)
            await collector.requests(2 if again else 1)
            await eventually(lambda: sum(counts(telemetry)) == 2)
            assert counts(telemetry) == ((2, 0) if again else (1, 1))
            assert again or collector.asked == 2


async def test_a_batch_is_not_tried_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be what the collector dies of."""
    monkeypatch.setattr(otlp, "TRIES", 3)
    async with Collector() as collector, telling(collector.url) as telemetry:
        collector.status = 503
        tell(telemetry)
        await eventually(lambda: counts(telemetry) == (0, 1))
        assert collector.asked == 3


async def test_a_collector_says_when_to_come_again() -> None:
    """Not sooner; but not as late as it likes."""
    assert [asked(text) for text in (None, "1.5", "0", "9" * 99, "-3", "nan", "Wed, 21 Oct 2026 07:28:00 GMT")] == [
        None,
        1.5,
        0.0,
        otlp.LONGEST_ASKED,
        None,
        None,
        None,
    ]
    async with Collector() as collector, telling(collector.url) as telemetry:
        collector.status, collector.more = 429, {"retry-after": "30"}
        tell(telemetry)
        await eventually(lambda: collector.asked == 1)
        await asyncio.sleep(0.15)
        assert collector.asked == 1


async def test_what_is_taken_in_part_is_counted_so(caplog: pytest.LogCaptureFixture) -> None:
    """With the collector's own word, on one line."""
    with caplog.at_level(logging.INFO, "firsttoken"):
        async with Collector() as collector, telling(collector.url) as telemetry:
            collector.reject = 2
            tell(telemetry, 5)
            telemetry.flush()
            await eventually(lambda: sum(counts(telemetry)) == 5)
            assert counts(telemetry) == (3, 2)
    assert [entry.message.partition("spans: ")[2] for entry in caplog.records] == ["it rejected 2 of 5: no room"]


async def test_redirects_are_not_followed() -> None:
    """What is configured is where it goes: headers may hold a key."""
    async with Collector() as collector, Collector() as other, telling(collector.url) as telemetry:
        collector.status, collector.more = 307, {"location": f"{other.url}/v1/traces"}
        tell(telemetry)
        await eventually(lambda: counts(telemetry) == (0, 1))
        assert other.asked == 0


async def test_a_connection_that_idled_for_too_long_is_not_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """A collector closes it as we send: once more, at once."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    async with Upstream([answer], [CLOSE], [answer]) as upstream, telling(upstream.url) as telemetry:
        for done in (1, 2):
            tell(telemetry)
            telemetry.flush()
            await eventually(lambda done=done: counts(telemetry) == (done, 0))
    assert caplog.records == []


async def test_prometheus_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the admin port, where traces are configured and nowhere else."""
    async with Collector() as collector, serving(collector.url) as gateway:
        assert await served(gateway, 1)
        await collector.taken(1, lambda span: span.kind == Span.SPAN_KIND_SERVER)
        page = (await get(gateway.admin_url, "/metrics"))[2].decode()
        (exported,) = [line for line in page.splitlines() if line.startswith("firsttoken_spans_exported_total ")]
        assert float(exported.split()[1]) == len(collector.spans)
        assert "firsttoken_spans_lost_total 0.0" in page
    async with Upstream([STREAMED]) as upstream, running({"only": pool(upstream.url)}) as gateway:
        assert b"firsttoken_spans" not in (await get(gateway.admin_url, "/metrics"))[2]


async def test_a_record_that_cannot_be_told_is_its_own_loss(caplog: pytest.LogCaptureFixture) -> None:
    """Our bug; the others are told."""
    async with Collector() as collector, telling(collector.url) as telemetry:
        broken = record(trace=TRACER.trace({})._replace(id="no digits"))
        telemetry(broken)
        tell(telemetry, 3)
        assert len(await collector.requests(3)) == 3
    assert "could not be told" in caplog.text
