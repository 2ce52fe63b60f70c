"""The dashboard in a real browser, with a real gateway under simulated traffic."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession

from gateway.app import Gateway
from gateway.bottleneck import Bottleneck
from tests.programs.browser.chromium import BINARY, Page, browsing
from tests.support.builders import CHAT
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium here (Debian and Ubuntu: apt install chromium)")

ROUTES = {
    "chat": {"tiers": ["small", "dead"], "ttft": {"budget": "500ms"}},
    "agent": {"tiers": ["small"], "ttft": {"budget": "20ms"}},
}
ONLY_CHAT = (  # few of them are late
    "document.querySelectorAll('#misses tbody tr').length > 0 && [...document.querySelectorAll('#misses button')]"
    ".every((button) => button.closest('tr').cells[2].textContent === 'chat')"
)
SHOTS = os.environ.get("FIRSTTOKEN_SHOTS")  # a folder for screenshots


@asynccontextmanager
async def busy(**more: Any) -> AsyncIterator[Gateway]:
    """Two engines, a dead endpoint, two routes of which one cannot meet its budget, and callers."""
    async with engines(2) as two:
        pools = {"small": engine_pool(*two), "dead": {**engine_pool(two[0]), "endpoints": ["http://127.0.0.1:9"]}}
        async with running(pools, ROUTES, **more) as gateway, ClientSession() as client:
            calling = [asyncio.create_task(call_forever(client, gateway, seed)) for seed in range(3)]
            try:
                yield gateway
            finally:
                for task in calling:
                    task.cancel()
                await asyncio.gather(*calling, return_exceptions=True)


async def call_forever(client: ClientSession, gateway: Gateway, seed: int) -> None:
    rng = random.Random(seed)
    while True:
        body = {
            "model": rng.choice(list(ROUTES)),
            "stream": True,
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "word " * rng.randrange(500)}],
        }
        with suppress(ClientError):
            async with client.post(f"{gateway.url}/v1/chat/completions", json=body) as reply:
                await reply.read()
        await asyncio.sleep(rng.random() / 20)


async def asked(gateway: Gateway, path: str) -> Any:
    async with ClientSession() as client, client.get(f"{gateway.admin_url}{path}") as reply:
        return await reply.json()


async def rows(page: Page, table: str) -> list[list[str]]:
    return await page.run(
        f"[...document.querySelectorAll('#{table} tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )


async def opened(page: Page, gateway: Gateway, address: str = "") -> None:
    """The page, with figures of both routes and a miss."""
    await page.open(f"{gateway.admin_url}/dashboard{address}")
    await page.until("document.querySelectorAll('#routes .last').length === 2")
    await page.until("document.querySelectorAll('#misses button').length > 1")


async def test_the_page_shows_live_figures_without_console_errors() -> None:
    """Rates, quantiles and shares of routes, endpoint states with reasons, and stage times of the worst misses."""
    async with busy() as gateway, browsing() as page:
        await page.resize(1280)
        await opened(page, gateway)
        await page.until("document.querySelector('#routes .p95').getAttribute('d').includes('L')")
        chat, agent = await rows(page, "routes")
        assert (chat[0].strip(), chat[4].endswith("500 ms"), agent[4].endswith("20 ms")) == ("▸ chat", True, True)
        assert float(chat[1]) > 0
        assert all(cell.endswith(" ms") for cell in (*chat[2:4], *agent[2:4]))
        assert (chat[5], chat[6], chat[7]) == ("100% / 90%", "0", "small 100%")
        assert float(agent[5].partition("%")[0]) < 90
        assert await page.run("document.querySelectorAll('#routes tr:nth-child(2) .bad').length") > 0
        fleet = {row[0]: row for row in await rows(page, "fleet")}
        assert (fleet["dead/127.0.0.1:9"][1].startswith("down, again in")) is True
        assert any("connection refused 2 times in a row" in row for row in fleet)
        assert sum(row[1:2] == ["up"] for row in fleet.values()) == 2
        assert {row[7] for row in fleet.values() if row[1:2] == ["up"]} <= set(Bottleneck)
        await page.until("document.querySelectorAll('#prefixes .meter').length > 0")
        assert {row[1] for row in await rows(page, "prefixes")} == {"small"}
        misses = await rows(page, "misses")
        assert 0 < len(misses) <= 15
        assert "agent" in {row[2] for row in misses}  # on a busy machine of the other route too
        assert await page.run("document.querySelectorAll('#misses .bar .s-upstream').length") == len(misses)
        assert await page.run("document.getElementById('status').textContent") == "live"
        assert "req/s" in await page.run("document.getElementById('whole').textContent")
        assert page.complaints == []
        assert {url.rpartition("/")[0] for url in page.requests if not url.startswith("data:")} == {gateway.admin_url}


async def test_the_verdict_is_the_first_thing_on_the_page_and_leads_to_a_request() -> None:
    """Whole and in view at every width, without a scroll; a click opens the request that shows the cause."""
    async with busy() as gateway, browsing() as page:
        for width in (1280, 390):
            await page.resize(width)
            await page.open(f"{gateway.admin_url}/dashboard")
            await page.until("!!document.querySelector('#verdicts .late a')")
            summary = await page.run("document.getElementById('summary').textContent")
            assert summary == "1 route with trouble, 1 fine."
            text = await page.run("document.querySelector('#verdicts .late').textContent")
            assert text.startswith("agent late: ")
            assert "within 20 ms, 90% promised: " in text
            place = await page.run("document.querySelector('#verdicts .late').getBoundingClientRect().toJSON()")
            assert place["left"] >= 0
            assert (place["right"] <= width, place["bottom"] < 400) == (True, True)
        await page.run("document.querySelector('#verdicts .late a').click()")
        assert await page.until("document.querySelector('#misses .opened')?.checkVisibility()")
        assert page.complaints == []


async def test_no_column_is_cut_and_the_share_met_is_in_view_at_every_width() -> None:
    async with busy() as gateway, browsing() as page:
        for width in (1280, 390):
            await page.resize(width)
            await opened(page, gateway)
            cut = (
                "[...document.querySelectorAll('main > section .wide')].map((one) => one.scrollWidth - one.clientWidth)"
            )
            assert await page.run(cut) == [0, 0, 0]
            met = "document.querySelector('#routes tbody tr').cells[5].getBoundingClientRect().right"
            assert 0 < await page.run(met) <= width


async def test_a_route_opens_to_its_further_figures_and_stays_open() -> None:
    async with busy() as gateway, browsing() as page:
        await opened(page, gateway)
        await page.run("document.querySelector('#routes button').click()")
        text = await page.until("document.querySelector('#routes .opened')?.textContent")
        assert all(name in text for name in ("p99 ", "within every budget ", "tokens/s", "per 1000 requests", "held"))
        looks = "performance.getEntriesByName(new URL('fleet', location).href).length"
        seen = await page.run(looks)
        await page.until(f"{looks} > {seen} + 1")
        assert await page.run("document.querySelector('#routes button').getAttribute('aria-expanded')") == "true"
        await page.run("document.querySelector('#routes button').click()")
        await page.until("!document.querySelector('#routes .opened')")


async def test_misses_come_by_the_time_over_and_open_by_the_keyboard() -> None:
    """The row opens to the diagnosis; the focus stays over the next looks, and a reload shows the same row."""
    async with busy() as gateway, browsing() as page:
        await opened(page, gateway)
        over = [each["why"]["over_ms"] for each in await asked(gateway, "/requests?worst=15")]
        assert over == sorted(over, reverse=True)
        await page.run("document.getElementById('more').open = true")
        await page.run("document.querySelector('#misses button').focus()")
        await page.press("Enter", 13, "\r")
        text = await page.until("document.querySelector('#misses .opened')?.textContent")
        assert await page.run("document.activeElement.getAttribute('aria-expanded')") == "true"
        request = await page.run("new URLSearchParams(location.hash.slice(1)).get('request')")
        (record,) = await asked(gateway, f"/requests?id={request}")
        assert record["why"]["evidence"][:40] in text
        assert record["why"]["mend"][:40] in text
        assert f"firsttoken why {request}" in text
        looks = "performance.getEntriesByName(new URL('fleet', location).href).length"
        seen = await page.run(looks)
        await page.until(f"{looks} > {seen} + 1")
        assert await page.run("document.activeElement.getAttribute('aria-expanded')") == "true"
        await page.command("Page.reload")
        await page.until(f"document.querySelector('#misses .opened')?.textContent.includes('{request}')")
        await page.run("document.querySelector('#misses [aria-expanded=true]').click()")
        await page.until("!document.querySelector('#misses .opened')")
        assert page.complaints == []


async def test_windows_and_filters_are_in_the_address_and_survive_a_reload() -> None:
    """Counts of the window are the gateway's: a page opened later has them at once."""
    async with busy() as gateway, browsing() as page:
        await opened(page, gateway)
        await page.run("document.querySelector('[name=window][value=\"1h\"]').click()")
        await page.until("document.getElementById('routes-note').textContent.startsWith('last hour, of which')")
        await page.run(
            "(() => { const list = document.getElementById('filter-route');"
            " list.value = 'chat'; list.dispatchEvent(new Event('change')); })()"
        )
        await page.until(ONLY_CHAT)
        assert await page.run("location.hash") == "#window=1h&route=chat"
        await page.command("Page.reload")
        await page.until(ONLY_CHAT)
        assert await page.run("document.querySelector('[name=window]:checked').value") == "1h"
        await page.until("Number(document.querySelector('#routes tbody tr')?.cells[1].textContent) > 0")
        link = await page.run("document.getElementById('export-csv').getAttribute('href')")
        assert link == "requests?within=3600&route=chat&worst=500&format=csv"
        await page.run("document.getElementById('filter-route').value = ''")
        await page.run("document.getElementById('filter-route').dispatchEvent(new Event('change'))")
        await page.until("document.querySelectorAll('#misses button').length > 1")
        link = await page.run("document.getElementById('export-csv').href")
        text = await page.run(f"fetch('{link}').then((reply) => reply.text())")
        assert len(text.splitlines()) > 2
        assert page.complaints == []


async def test_a_link_that_names_what_is_gone_shows_all_else_and_says_so() -> None:
    """A route that a reload has renamed, and a window that is none: the filter is there to be taken back."""
    async with busy() as gateway, browsing() as page:
        await page.open(f"{gateway.admin_url}/dashboard#window=constructor&route=renamed")
        await page.until("document.querySelectorAll('#routes .last').length === 2")
        assert await page.run("document.getElementById('status').textContent") == "live"
        assert await rows(page, "misses") == [["a filter names what is not there"]]
        assert await page.run("document.querySelector('[name=window]:checked').value") == "now"
        await page.run("document.getElementById('filter-route').value = ''")
        await page.run("document.getElementById('filter-route').dispatchEvent(new Event('change'))")
        await page.until("document.querySelectorAll('#misses button').length > 1")


@pytest.mark.parametrize("width", [1280, 390])
async def test_the_page_fits_and_every_control_has_a_name(width: int) -> None:
    """No scrolling sideways but within a table; a screen reader tells every control and every table."""
    async with busy() as gateway, browsing() as page:
        await page.resize(width)
        await opened(page, gateway)
        await page.run("document.querySelector('#misses button').click()")
        await page.until("!!document.querySelector('#misses .opened')")
        assert await page.run("document.documentElement.scrollWidth") <= width
        nodes = (await page.command("Accessibility.getFullAXTree"))["nodes"]
        roles = {"button", "link", "radio", "combobox", "textbox", "region"}
        names = [
            (node["role"]["value"], node["name"]["value"]) for node in nodes if not node["ignored"] and "name" in node
        ]
        controls = [(role, name) for role, name in names if role in roles]
        assert [role for role, name in controls if not name] == []
        assert {name for role, name in controls if role == "radio"} == {"now", "5 min", "1 h"}
        assert {"Misses", "Routes", "Endpoints", "Prefixes"} <= {
            name.split(" ")[0] for role, name in controls if role == "region"
        }
        if SHOTS:
            await page.screenshot(Path(SHOTS) / f"page-{width}.png", "light" if width > 1000 else "dark", width, 600)


async def test_the_page_explains_a_request_and_escapes_markup() -> None:
    """Every endpoint of every tier, with a reason."""
    hostile = json.dumps({**CHAT, "model": "<img src=x onerror=document.title='taken'>"})
    async with busy() as gateway, browsing() as page:
        await page.open(f"{gateway.admin_url}/dashboard")
        await page.until("document.getElementById('fleet').textContent.includes('down')")
        await page.run("document.getElementById('go').click()")
        await page.until("document.querySelectorAll('#answer tbody tr').length === 4")  # one belief
        found_rows = await page.run("[...document.querySelectorAll('#answer tbody tr')].map(row => row.textContent)")
        assert sum("chosen: " in row for row in found_rows) == 1
        assert sum("rejected: down" in row for row in found_rows) == 1
        assert page.complaints == []
        await page.run(f"document.getElementById('request').value = {json.dumps(hostile)}")
        await page.run("document.getElementById('go').click()")
        message = await page.until("document.querySelector('#answer p.bad')?.textContent")
        assert message.startswith("The model '<img src=x onerror")
        assert await page.run("document.querySelectorAll('img').length") == 0
        assert await page.run("document.title") == "firsttoken"


async def test_the_page_survives_a_restart_of_the_gateway() -> None:
    """Counters restart from zero, without negative rates."""
    async with browsing() as page:
        async with busy() as gateway:
            await page.open(f"{gateway.admin_url}/dashboard")
            await page.until("document.querySelectorAll('#routes .last').length === 2")
            admin = gateway.admin_url.removeprefix("http://")
        await page.until("document.getElementById('status').className === 'gone'")
        async with busy(server={"listen": "127.0.0.1:0", "admin": admin}):
            await page.until("document.getElementById('status').className === 'live'")


async def test_a_browser_reads_the_stages_from_server_timing() -> None:
    """Of a streamed answer, on a page of the same origin."""
    asked = {**CHAT, "stream": True, "max_tokens": 3}
    script = f"""(async () => {{
      const reply = await fetch("/v1/chat/completions",
        {{method: "POST", headers: {{"content-type": "application/json"}}, body: {json.dumps(json.dumps(asked))}}});
      await reply.text();
      await new Promise((done) => setTimeout(done, 50));
      const entry = performance.getEntriesByType("resource").find((one) => one.name.endsWith("/completions"));
      return {{status: reply.status, id: reply.headers.get("x-request-id"),
        stages: Object.fromEntries(entry.serverTiming.map((one) => [one.name, one.duration])),
        took: entry.responseStart - entry.requestStart}};
    }})()"""
    async with busy() as gateway, browsing() as page:
        await page.open(f"{gateway.url}/health")
        found_rows = await page.run(script)
        assert found_rows["status"] == 200
        stages = found_rows["stages"]
        assert {"read", "parse", "estimate", "admit", "queue", "decide", "connect", "send", "upstream", "relay"} <= set(
            stages
        )
        assert 0 < stages["upstream"] <= found_rows["took"] + 1


async def test_a_beacon_of_a_page_reaches_the_record() -> None:
    """`navigator.sendBeacon` from another origin, which reads no reply."""
    sent_body = {**CHAT, "stream": True, "max_tokens": 3}
    async with busy() as gateway, browsing() as page:
        await page.open(f"{gateway.url}/health")
        script = f"""(async () => {{
          const began = performance.now();
          const reply = await fetch("/v1/chat/completions", {{method: "POST",
            headers: {{"content-type": "application/json", "x-request-id": "from-a-page"}},
            body: {json.dumps(json.dumps(sent_body))}}});
          await reply.body.getReader().read();
          const ttft_ms = performance.now() - began;
          const body = JSON.stringify({{request_id: "from-a-page", ttft_ms}});
          return [navigator.sendBeacon("{gateway.admin_url}/ttft", body), ttft_ms];
        }})()"""
        sent, ttft = await page.run(script)
        assert sent is True
        async with asyncio.timeout(10):
            while True:
                found = await asked(gateway, "/requests?id=from-a-page")
                if found and found[0]["on_screen_ms"] is not None:
                    break
                await asyncio.sleep(0.05)
        assert found[0]["on_screen_ms"] == pytest.approx(ttft, abs=0.01)
        assert found[0]["ttft_ms"] <= ttft + 1
