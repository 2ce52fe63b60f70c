"""Clocks that jump: decisions use the monotonic clock; the wall clock only labels what people and calendars read."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import UTC, date, datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from gateway.config import price_section
from gateway.observe import recorder
from gateway.observe.record import RequestOutcome
from tests.support.builders import CHAT, DONE, FINISH, TOKEN, calling, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

pytestmark = pytest.mark.virtual_time

ROOT = Path(__file__).parents[2]
WALL = re.compile(r"from time import [^\n]*\btime(_ns)?\b|\btime\.time(_ns)?\(|datetime\.now|utcnow")
DAY = 86_400.0
SLOW: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]
READERS = {
    "backends/rate_limit_headers.py": "a time to wait that is a date",
    "backends/facts/refreshed.py": "a day after which no file of facts can have been read",
    "backends/translation/chat_to_messages/answer.py": "`created` of a chat's chunks",
    "gateway/admin/gateway_admin.py": "ages on a page",
    "gateway/admission/local_quotas.py": "the calendar month, by SteadyWall",
    "gateway/parts/answers/answer_cache.py": "the age of a kept answer, as the caller is told",
    "gateway/api/request_headers.py": "a deadline that a caller sets, bounded",
    "gateway/parts/answers/answer_stores.py": "the age of a kept answer, which replicas share",
    "gateway/wiring.py": "the hour of the day, by which an API is forecast",
    "gateway/cli/live/live_check.py": "the distance to the clocks of endpoints",
    "gateway/cli/learned_facts.py": "the time until which a lesson holds, for people",
    "gateway/files.py": "the age of a file that a write has left",
    "gateway/cli/records_command.py": "the beginning of a period that is asked for",
    "gateway/cli/top_tables.py": "ages on a screen",
    "gateway/cli/up/tier_models.py": "the date by which models leave an API",
    "gateway/config/price_section.py": "the day whose prices of models are in force",
    "gateway/downstream/http_request.py": "the Date of a reply",
    "gateway/admission/key_file.py": "the dates of keys and revocations, for people and for their end",
    "gateway/admission/key_store.py": "the same",
    "gateway/admission/keyring.py": "the same",
    "gateway/fleet/learned_keeper.py": "the age of what was learned before a restart",
    "gateway/parts/prefix_doctor/part.py": "the date of a report",
    "gateway/observe/recorder.py": "the date of a Record",
    "gateway/observe/windows/history_keeper.py": "slots of counts by the clock on the page",
    "gateway/reload.py": "the date of a reload",
    "gateway/parts/responses/responses_sockets.py": "`created` of an answer without a server",
    "gateway/workers/admin_aggregator.py": "ages on a page",
    "lab/autoscale/autoscaler.py": "Records of another process are by its wall clock",
    "lab/autoscale/demand.py": "the same",
    "lab/autoscale/gateway_reader.py": "the same",
    "lab/servers/simulated_server.py": "what an engine says of itself",
}


def test_the_wall_clock_is_read_by_these_alone() -> None:
    """None of them decides where a request goes or how long anything waits, but for a provider's date (bounded), and
    the hour of the day, which is read once."""
    sources = {
        str(path.relative_to(ROOT)): path
        for room in ("gateway", "policies", "backends", "lab")
        for path in (ROOT / room).rglob("*.py")
    }
    assert {name for name, path in sources.items() if WALL.search(path.read_text("utf-8"))} == READERS.keys()


@pytest.mark.parametrize("jump", [DAY, -DAY])
async def test_a_wall_clock_that_jumps_in_mid_request_harms_no_record(
    jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is whole; every duration is that of the monotonic clock."""
    async with Upstream(SLOW) as engine, running({"only": pool(engine.url)}) as gateway, calling(gateway.url) as caller:
        assert (await caller.ask(post({**CHAT, "stream": True})))[0] == 200
        monkeypatch.setattr(recorder, "time", lambda: time.time() + jump)
        await asyncio.sleep(0.05)
        engine.proceed()
        assert b"".join(await caller.chunks()) == TOKEN + FINISH + DONE
        await eventually(lambda: gateway.recorder.recent)
        found = last(gateway)
        assert found.end is RequestOutcome.COMPLETED
        assert 0.05 <= found.total < DAY / 2
        assert all(0 <= seconds < DAY / 2 for seconds in found.stages.values())
        assert abs(found.wall - time.time()) < DAY / 2
        engine.proceed()
        await caller.ask(post({**CHAT, "stream": True}))
        await caller.chunks()
        await eventually(lambda: len(gateway.recorder.recent) == 2)
        assert abs(last(gateway).wall - time.time() - jump) < DAY / 2
        assert 0 <= last(gateway).total < DAY / 2


def test_prices_change_with_the_day_of_utc_wherever_the_gateway_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 23:30 of 31 December in UTC it is the next year already in Tokyo, and still afternoon in Los Angeles."""
    late = datetime(2026, 12, 31, 23, 30, tzinfo=UTC)

    class Frozen(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            """Read a local clock nine hours ahead where no zone is asked for."""
            return late.astimezone(tz) if tz is not None else (late + timedelta(hours=9)).replace(tzinfo=None)

    monkeypatch.setattr(price_section, "datetime", Frozen)
    assert price_section.today() == date(2026, 12, 31)
