"""Reload of a running gateway: after a change of files, on SIGHUP, on POST /reload, on a day of other prices.

Rules:
- A configuration is checked completely before anything changes. After a refusal the previous configuration stays in
  force, and the log has the lines of `firsttoken check`.
- Reading, checking and building run in a thread; the swap is a single turn of the loop.
- A changed file is read after two checks with equal state, because the first may find a half-written file. Each
  version is tried once. The same holds for a day (UTC) on which a price of the facts changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from time import time

from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from backends.facts.fact_rows import edition
from gateway.admin.admin_replies import json_response
from gateway.api.api_error import ApiError
from gateway.config.config_errors import ConfigError
from gateway.config.loading import Change, change
from gateway.config.models import Config
from gateway.config.price_section import today
from gateway.files import CHECK_INTERVAL, FileWatch
from gateway.observe.metrics.series import gauge, totals
from gateway.strict_json import encode
from gateway.tokenize.tokenizers import EncoderError, encoder

log = logging.getLogger("firsttoken")


FACTS = "facts"  # beside the paths of a configuration that have changed


class ConfigSource:
    """Source of configurations, to be created before the first read. `load` raises ConfigError."""

    def __init__(self, load: Callable[[], Config], files: Sequence[Path] = ()) -> None:
        self.load, self.watch = load, FileWatch(files)
        self.edition = 0  # of the facts in force, beside the configuration

    def next(self, before: Config) -> Change:
        """The configuration to replace `before`. Blocks; raises ConfigError."""
        self.watch.begin_read()
        found = change(before, self.load())
        try:
            for tokenizer in dict.fromkeys(pool.tokenizer for pool in found.config.pools.values()):
                encoder(tokenizer)
        except EncoderError as error:
            raise ConfigError([str(error)]) from None
        if self.edition != edition():
            self.edition, found = edition(), replace(found, changed=(*found.changed, FACTS))
        return found


class ReloadCounts(Collector):
    """Counts and logs reloads."""

    def __init__(self) -> None:
        self._applied = self._refused = 0
        self._loaded_at = time()  # the configuration in force

    def applied(self, found: Change, reason: str) -> None:
        self._applied += 1
        self._loaded_at = time()
        if found.changed:
            log.info("configuration reloaded (%s): %s", reason, ", ".join(found.changed))
        if found.restart:
            log.warning("configuration changes that need a restart to take effect: %s", ", ".join(found.restart))
        if not (found.changed or found.restart):
            log.info("configuration reloaded (%s): no changes", reason)

    def refused(self, error: ConfigError, reason: str) -> None:
        self._refused += 1
        log.error("configuration reload refused (%s), keeping the previous configuration:\n%s", reason, error)

    def collect(self) -> Iterable[Metric]:
        counts = (("applied",), self._applied), (("refused",), self._refused)
        yield from totals("firsttoken_config_reloads_total", counts)
        yield gauge("firsttoken_config_loaded_timestamp_seconds", [((), self._loaded_at)])


Apply = Callable[[Config], Awaitable[Sequence[str] | None]]


class Reloader:
    """Runs one reload at a time. `apply`: applies a configuration; returns the processes that failed."""

    def __init__(self, config: Config, source: ConfigSource, apply: Apply) -> None:
        self.config = config
        self.counts = ReloadCounts()
        self._source = source
        source.edition = edition()
        self._apply = apply
        self._without: Sequence[str] = ()  # processes that have not applied the configuration in force
        self._day = today()
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        if self._source.watch.files:
            self._spawn(self._watch_files())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reload_soon(self, reason: str) -> None:
        """The result is in the log."""
        self._spawn(self._reload_logged(reason))

    async def reload(self, reason: str) -> Change:
        """Raises ConfigError; the previous configuration is then still in force."""
        async with self._lock:
            try:
                found = await asyncio.to_thread(self._source.next, self.config)
                if found.changed:
                    self._without = await self._apply(found.config) or ()
            except ConfigError as error:
                self.counts.refused(error, reason)
                raise
            self.config = found.config
            self.counts.applied(found, reason)
            return found

    async def on_post(self) -> web.Response:
        """POST /reload. Raises ApiError."""
        try:
            found = await self.reload("POST /reload")
        except ConfigError as error:
            raise ApiError(400, str(error), code="invalid_config") from None
        result = "applied" if found.changed else "unchanged"
        answer = {"result": result, "changed": found.changed, "restart": found.restart}
        if found.changed and self._without:
            answer["not_applied_by"] = self._without
        return json_response(200, encode(answer))

    async def _reload_logged(self, reason: str) -> None:
        try:
            await self.reload(reason)
        except ConfigError:
            return  # logged by `refused`
        except Exception:
            log.exception("configuration reload failed (%s)", reason)

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            if await asyncio.to_thread(self._source.watch.changed):
                await self._reload_logged("a file changed")
            elif self._prices_change(today()):
                await self._reload_logged("a price changed")

    def _prices_change(self, day: date) -> bool:
        """Since the day of the last look."""
        before, self._day = self._day, day
        return before != day and any(pool.is_repriced_on(day) for pool in self.config.pools.values())

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
