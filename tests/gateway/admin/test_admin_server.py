"""The admin port of a running gateway."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from base64 import b64encode
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.observe.part_notes import ON_SCREEN
from gateway.observe.record_columns import RECORD
from tests.support.builders import ANSWER, CHAT, TOKEN, calling, conversing, get, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def served() -> AsyncIterator[tuple[Gateway, Upstream]]:
    """A gateway with something to hide, three requests old."""
    async with Upstream([STREAM_HEAD + chunk(ANSWER) + LAST_CHUNK]) as upstream:
        hidden = {"api_key": "sk-CANARY-backend", "headers": {"x-org": "CANARY-header"}}
        async with running(
            {"only": pool(upstream.url, **hidden), "small": pool("http://127.0.0.1:9", context_window=1)},
            {"chat": {"tiers": ["small", "only"], "ttft": {"budget": "5s"}}},
            state={"redis": "redis://:CANARY-password@127.0.0.1:6379/0"},
        ) as gateway:
            for i in range(3):
                async with calling(gateway.url) as caller:
                    await caller.ask(post({**CHAT, "stream": True}, f"x-request-id: id-{i}"))
                    await caller.chunks()
            yield gateway, upstream


async def asked(gateway: Gateway, path: str) -> Any:
    status, headers, body = await get(gateway.admin_url, path)
    assert (status, headers["content-type"]) == (200, "application/json")
    return json.loads(body)


async def explained(gateway: Gateway, body: Any, *headers: str, path: str = "/explain") -> tuple[int, Any]:
    async with calling(gateway.admin_url) as caller:
        status, _, said = await caller.whole(post(body, *headers, path=path))
        return status, json.loads(said)


# --------------------------------------------------------------------------- GET


@pytest.mark.parametrize(
    ("accept", "kind", "last"),
    [
        ("", "text/plain; version=0.0.4", b""),
        ("text/plain", "text/plain; version=0.0.4", b""),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text; version=1.0.0", b"# EOF"),
    ],
)
async def test_metrics_come_in_the_format_that_is_asked_for(
    accept: str, kind: str, last: bytes, served: tuple[Gateway, Upstream]
) -> None:
    """Prometheus text, or OpenMetrics where accepted."""
    status, headers, body = await get(served[0].admin_url, "/metrics", f"accept: {accept}")
    assert (status, headers["content-type"].startswith(kind)) == (200, True)
    assert b'firsttoken_requests_total{outcome="completed",pool="only",route="chat"} 3.0' in body
    assert b"process_resident_memory_bytes" in body
    assert body.splitlines()[-1] == last or not last


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [
        *(("gzip", True), ("br, GZIP;q=0.5", True), ("gzip; q=1.0", True)),
        *(("gzip;q=0", False), ("gzip;q=0.0", False), ("", False), ("br", False), ("identity, xgzip", False)),
    ],
)
async def test_metrics_are_compressed_where_that_is_accepted(
    accepted: str, compressed: bool, served: tuple[Gateway, Upstream]
) -> None:
    status, headers, body = await get(served[0].admin_url, "/metrics", f"accept-encoding: {accepted}")
    assert (status, headers.get("content-encoding", "") == "gzip") == (200, compressed)
    assert int(headers["content-length"]) == len(body)
    page = gzip.decompress(body) if compressed else body
    assert b'firsttoken_requests_total{outcome="completed",pool="only",route="chat"} 3.0' in page
    assert not compressed or len(body) < len(page) / 4


async def test_recent_requests_are_shown_the_newest_last(served: tuple[Gateway, Upstream]) -> None:
    """All recent requests, or the last few."""
    gateway, _ = served
    found = [[r["request_id"] for r in await asked(gateway, path)] for path in ("/requests", "/requests?last=2")]
    assert found == [["id-0", "id-1", "id-2"], ["id-1", "id-2"]]
    assert await asked(gateway, "/requests?last=0") == []
    assert len(await asked(gateway, "/requests?last=999999999")) == 3


@pytest.mark.parametrize("last", ["", "-1", "x", "1.5", "%C2%B2", "9" * 5000, "%00"])
async def test_an_invalid_number_in_a_query_is_refused(last: str, served: tuple[Gateway, Upstream]) -> None:
    """400, by name."""
    status, _, body = await get(served[0].admin_url, f"/requests?last={last}")
    assert (status, json.loads(body)["error"]["param"]) == (400, "last")


async def test_the_fleet_is_shown_endpoint_by_endpoint(served: tuple[Gateway, Upstream]) -> None:
    """Load and learned statistics of each."""
    found = {entry["endpoint"]["id"]: entry for entry in await asked(served[0], "/fleet")}
    assert set(found) == {served[0].runtime.current.pools[name].endpoints[0].id for name in ("only", "small")}
    only = next(entry for entry in found.values() if entry["endpoint"]["pool"] == "only")
    assert (only["samples"], only["breaker"], only["load"]["health"], only["load"]["in_flight"]) == (
        3,
        "closed",
        "up",
        0,
    )


async def test_the_configuration_is_shown_without_its_secrets(served: tuple[Gateway, Upstream]) -> None:
    """Neither keys of backends, nor headers with keys, nor the password in a URL."""
    shown = await asked(served[0], "/config")
    assert "CANARY" not in json.dumps(shown)
    assert shown["pools"]["only"]["model"] == "served"
    assert shown["routes"]["chat"]["ttft"] == {"budget": 5.0, "per_1k_tokens": None, "target": 0.9, "of": "any"}


async def test_recent_requests_can_be_filtered(served: tuple[Gateway, Upstream]) -> None:
    """By request id, route, pool, outcome or missed budget; misspelt names are refused."""
    gateway, _ = served
    for query, expected in (
        ("id=id-1", ["id-1"]),
        ("route=chat&pool=only&outcome=completed&last=1", ["id-2"]),
        ("slow=1", []),
        ("outcome=shed", []),
    ):
        assert [r["request_id"] for r in await asked(gateway, f"/requests?{query}")] == expected, query
    slowest = [r["ttft_ms"] for r in await asked(gateway, "/requests?slowest=2")]
    assert slowest == sorted((RECORD.view(record)["ttft_ms"] for record in gateway.recorder.recent), reverse=True)[:2]
    for query, param in (("route=chatt", "route"), ("outcome=late", "outcome"), ("lst=1", "lst"), ("id=", "id")):
        status, _, body = await get(gateway.admin_url, f"/requests?{query}")
        assert (status, json.loads(body)["error"]["param"]) == (400, param)
    status, _, body = await get(gateway.admin_url, "/requests?last=1&last=2")
    assert (status, json.loads(body)["error"]["message"]) == (400, "Give each filter once.")


async def test_routes_are_counted_since_the_start(served: tuple[Gateway, Upstream]) -> None:
    """Viewers take differences; the greatest lateness of the loop is left to Prometheus."""
    gateway, _ = served
    gateway.core.metrics.loop_lag.saw(3.0, 0.0)
    said = await asked(gateway, "/routes")
    (chat,) = said["routes"]
    assert (chat["route"], chat["ttft_budget_ms"], chat["requests"]) == ("chat", 5000.0, {"completed": 3.0})
    assert (sum(chat["ttft_ms"]["counts"]), chat["slo"]["ttft"], chat["held"]) == (3.0, {"true": 3.0}, 0.0)
    assert len(chat["ttft_ms"]["counts"]) == len(chat["ttft_ms"]["le"]) + 1
    assert 5000.0 in chat["ttft_ms"]["le"]
    assert chat["stages_ms"]["upstream"] > 0
    assert sum(said["gateway"]["loop_lag_ms"]["counts"]) >= 1
    assert gateway.core.metrics.loop_lag._greatest == 3.0


# --------------------------------------------------------------------------- beacons


async def beaconed(gateway: Gateway, body: Any, *headers: str) -> tuple[int, str | None]:
    async with calling(gateway.admin_url) as caller:
        status, found = await caller.ask(post(body, *headers, path="/ttft"))
        code = None if status == 204 else json.loads(await caller.body(found))["error"]["code"]
        return status, code


async def on_screen(gateway: Gateway) -> float:
    """Number of counted beacons."""
    return sum(s.value for m in gateway.admin.on_screen.collect() for s in m.samples if s.name.endswith("_count"))


async def test_a_beacon_is_joined_to_its_request(served: tuple[Gateway, Upstream]) -> None:
    """Sent as by `navigator.sendBeacon`, once; shown beside the measurement, and counted by route."""
    gateway, _ = served
    beacon = {"request_id": "id-1", "ttft_ms": 321.5}
    assert await beaconed(gateway, beacon, "content-type: text/plain;charset=UTF-8") == (204, None)
    assert await beaconed(gateway, beacon) == (409, "reported_before")
    assert [r["on_screen_ms"] for r in await asked(gateway, "/requests")] == [None, 321.5, None]
    page = (await get(gateway.admin_url, "/metrics"))[2]
    assert b'firsttoken_ttft_on_screen_seconds_bucket{le="0.5",route="chat"} 1.0' in page
    assert b'firsttoken_ttft_on_screen_seconds_sum{route="chat"} 0.3215' in page


async def test_a_page_of_another_origin_may_send_a_beacon_and_nothing_else(served: tuple[Gateway, Upstream]) -> None:
    """The page is of the caller's application. It reads no reply, and reaches no name of another machine."""
    gateway, _ = served
    origin, beacon = "origin: https://app.example", {"request_id": "id-1", "ttft_ms": 321.5}
    async with calling(gateway.admin_url) as caller:
        status, headers = await caller.ask(post(beacon, origin, path="/ttft"))
    assert (status, [name for name in headers if name.startswith("access-control-")]) == (204, [])
    async with calling(gateway.admin_url) as caller:
        raw = post(beacon, origin, path="/ttft").replace(b"host: localhost", b"host: rebound.example")
        assert (await caller.ask(raw))[0] == 403
    for path in ("/explain", "/reload", "/keys"):
        async with calling(gateway.admin_url) as caller:
            assert (await caller.ask(post(CHAT, origin, path=path)))[0] == 403


async def test_a_beacon_may_come_while_its_answer_is_still_written() -> None:
    """The usual case: the first token is on screen long before the last."""
    script: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(ANSWER) + LAST_CHUNK]
    async with conversing(script) as (gateway, caller, upstream):
        await caller.ask(post({**CHAT, "stream": True}, "x-request-id: now"))
        assert await beaconed(gateway, {"request_id": "now", "ttft_ms": 40}) == (204, None)
        upstream.proceed()
        await caller.chunks()
        await eventually(lambda: gateway.recorder.recent)
        assert RECORD.view(last(gateway))["on_screen_ms"] == 40.0
    assert not gateway.recorder.lives


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"request_id": "nobody", "ttft_ms": 1}, (404, "unknown_request")),
        ({"request_id": "id-1"}, (400, None)),
        ({"request_id": "id-1", "ttft_ms": True}, (400, None)),
        ({"request_id": "id-1", "ttft_ms": "1"}, (400, None)),
        ({"request_id": "id-1", "ttft_ms": -1}, (400, None)),
        ({"request_id": "id-1", "ttft_ms": 3_600_001}, (400, None)),
        ({"request_id": 5, "ttft_ms": 1}, (400, None)),
        ({"request_id": "x" * 129, "ttft_ms": 1}, (400, None)),
        (b"[]", (400, None)),
        (b'{"request_id":"id-1","ttft_ms":NaN}', (400, None)),
        (b"", (400, None)),
        (b" " * 5000, (413, None)),
    ],
)
async def test_an_invalid_beacon_is_ignored(
    body: Any, expected: tuple[int, str | None], served: tuple[Gateway, Upstream]
) -> None:
    """Neither an unknown id, nor an impossible time."""
    gateway, _ = served
    assert (await beaconed(gateway, body))[0] == expected[0]
    assert await on_screen(gateway) == 0
    assert [ON_SCREEN.of(record) for record in gateway.recorder.recent] == [None] * 3


async def test_a_beacon_without_content_length_is_bounded(served: tuple[Gateway, Upstream]) -> None:
    """The body is read up to the limit of a beacon only."""
    async with calling(served[0].admin_url) as caller:
        head = b"POST /ttft HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        status, headers = await caller.ask(head + chunk(b" " * 3000) + chunk(b" " * 3000))
    assert (status, headers["connection"]) == (413, "close")


async def test_a_request_without_a_first_token_has_none_on_screen() -> None:
    """Refused, or still waiting."""
    async with conversing() as (gateway, caller, _):
        await caller.whole(post({**CHAT, "model": "nope"}, "x-request-id: refused"))
        assert await beaconed(gateway, {"request_id": "refused", "ttft_ms": 1}) == (409, "no_first_token")


async def test_no_other_origin_may_read_the_admin_port(served: tuple[Gateway, Upstream]) -> None:
    """The port has no key: a page elsewhere may not read the port through a visitor's browser."""
    for path in ("/requests", "/routes", "/fleet", "/dashboard", "/metrics"):
        _, headers, _ = await get(served[0].admin_url, path, "origin: http://elsewhere.example")
        assert not [name for name in headers if name.startswith("access-control-")]


async def test_the_dashboard_runs_its_own_script_and_nothing_else(served: tuple[Gateway, Upstream]) -> None:
    """By policy; the page names no other host."""
    status, headers, body = await get(served[0].admin_url, "/dashboard")
    policy, page = headers["content-security-policy"], body.decode()
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    for tag in ("style", "script"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert f"{tag}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" in policy
    assert set(re.findall(r"https?://[^\s'\"<]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|style=", page)


async def test_the_root_of_the_admin_port_leads_to_the_page(served: tuple[Gateway, Upstream]) -> None:
    status, headers, _ = await get(served[0].admin_url, "/")
    assert (status, headers["location"]) == (302, "/dashboard")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/health", "/debug", "/metrics/"])
async def test_nothing_else_is_on_the_admin_port(path: str, served: tuple[Gateway, Upstream]) -> None:
    """The admin port asks for no key, so serves no model."""
    assert (await get(served[0].admin_url, path))[0] == 404


@pytest.mark.parametrize(
    "path", ["/metrics", "/requests", "/routes", "/fleet", "/config", "/explain", "/ttft", "/dashboard"]
)
async def test_nothing_of_the_admin_port_is_on_the_data_port(path: str, served: tuple[Gateway, Upstream]) -> None:
    """Callers learn nothing of the fleet."""
    assert (await get(served[0].url, path))[0] == 404


# --------------------------------------------------------------------------- explain


async def test_explain_names_candidates_and_reasons_and_sends_nothing(served: tuple[Gateway, Upstream]) -> None:
    """The same decision as a request would get now, in words."""
    gateway, upstream = served
    before = len(upstream.requests), gateway.monitor.loads(), len(gateway.recorder.recent)
    status, said = await explained(gateway, CHAT)
    assert (status, said["outcome"]) == (200, "place")
    (only,) = said["candidates"]
    assert only["endpoint"].startswith("only/")
    assert only["ttft_p50_ms"] > 0
    assert "p50" in only["reason"]
    (small,) = said["rejected"]
    assert (small["pool"], small["tier"]) == ("small", 1)
    assert "context window" in small["reason"]
    assert (len(upstream.requests), gateway.monitor.loads(), len(gateway.recorder.recent)) == before


async def test_explain_changes_no_later_decision(served: tuple[Gateway, Upstream]) -> None:
    """After any number of explanations, the next request is decided as if there had been none."""
    gateway, _ = served
    before = gateway.queue.sequence
    said = [(await explained(gateway, CHAT))[1] for _ in range(3)]
    assert (gateway.queue.sequence, gateway.queue.depth()) == (before, {})
    assert said[0]["held_now"] == {}


async def test_explain_asks_as_the_key_that_is_given() -> None:
    """The key selects the cache group; no key selects none, and an unknown key is refused."""
    key = {"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest(), "cache_group": "front"}
    long = {**CHAT, "stream": True, "messages": [{"role": "user", "content": "word " * 500}]}
    async with engines(1) as one, running({"only": engine_pool(*one)}, keys=[key]) as gateway:
        async with calling(gateway.url) as caller:
            await caller.ask(post({**long, "max_tokens": 1}, "authorization: Bearer sk-web"))
            await caller.chunks()
        _, own = await explained(gateway, long, "authorization: Bearer sk-web")
        _, nobodys = await explained(gateway, long)
        status, refused = await explained(gateway, long, "authorization: Bearer sk-other")
    assert own["candidates"][0]["hit_tokens"] >= 400
    assert nobodys["candidates"][0]["hit_tokens"] == 0
    assert (status, refused["error"]["code"]) == (401, "invalid_api_key")


async def test_explain_knows_both_operations_and_budget_headers(served: tuple[Gateway, Upstream]) -> None:
    """As the data port would."""
    gateway, _ = served
    status, said = await explained(
        gateway, {"model": "chat", "prompt": "hello"}, "x-slo-ttft-ms: 100", path="/explain?path=/v1/completions"
    )
    assert (status, said["outcome"]) == (200, "place")
    assert 0 < said["budget_left_ms"] <= 100


@pytest.mark.parametrize(
    ("body", "headers", "path", "status", "param"),
    [
        (b"", (), "/explain", 400, None),
        (b"[]", (), "/explain", 400, None),
        ({"model": "chat"}, (), "/explain", 400, "messages"),
        ({**CHAT, "model": "nope"}, (), "/explain", 404, "model"),
        (CHAT, (), "/explain?path=/v1/embeddings", 400, "path"),
        (CHAT, (), "/explain?path=/v1/completions", 400, "prompt"),
        (CHAT, ("x-slo-ttft-ms: soon",), "/explain", 400, "x-slo-ttft-ms"),
        (b"not gzip", ("content-encoding: gzip",), "/explain", 415, None),
    ],
)
async def test_explain_refuses_the_same_requests_as_the_data_port(
    body: Any, headers: tuple[str, ...], path: str, status: int, param: str | None, served: tuple[Gateway, Upstream]
) -> None:
    """In the same words."""
    found, said = await explained(served[0], body, *headers, path=path)
    assert (found, said["error"]["param"]) == (status, param)
