"""Another configuration for a gateway that runs: on a change of its files, on SIGHUP, on POST /reload.

Rules:
- All that can be wrong is found before anything is touched: what is refused leaves the one before in force, and says
  why, in the lines of `firsttoken check`.
- Reading, checking and building are done in a thread: the swap is one turn of the loop.
- A file that changed is read when two looks in a row find the same: it may have been half written at the first. Each
  version of it is tried once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from time import time

from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.admin.admin_server import json_response
from gateway.api.api_error import ApiError
from gateway.api.strict_json import encode
from gateway.config.changes import Change, change
from gateway.config.config_errors import ConfigError
from gateway.config.models import Config
from gateway.observe.metrics.series import counter, gauge
from gateway.tokenize.tokenizers import EncoderError, encoder

log = logging.getLogger("firsttoken")

LOOK = 1.0  # s between two looks at the files
KEPT = "the configuration was not reloaded (%s), the one before stays in force:\n%s"

Signature = tuple[tuple[int, int, int] | None, ...]


class ConfigSource:
    """Where the configuration comes from; to be made before it is read. `load` raises ConfigError."""

    def __init__(self, load: Callable[[], Config], files: Sequence[Path] = ()) -> None:
        self.load, self.files = load, files
        self._tried = self._seen = self._signature()

    def next(self, before: Config) -> Change:
        """What is to come into force after this one. Takes as long as it takes, and raises ConfigError."""
        self._tried = self._signature()
        found = change(before, self.load())
        try:
            for tokenizer in dict.fromkeys(pool.tokenizer for pool in found.config.pools.values()):
                encoder(tokenizer)
        except EncoderError as error:
            raise ConfigError([str(error)]) from None
        return found

    def look(self) -> bool:
        """Whether what is there now is new, and was there at the last look too."""
        before, self._seen = self._seen, self._signature()
        return self._seen == before and self._seen != self._tried

    def _signature(self) -> Signature:
        """Another whenever a file is: also one behind a link, as Kubernetes swaps the files of a ConfigMap."""
        return tuple(map(_signature, self.files))


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Reloads(Collector):
    """How often, and since when. `cells`: where it is counted, three numbers; `keep`: as
    they are."""

    def __init__(self, cells: memoryview[float] | None = None, keep: bool = False) -> None:
        self._cells = memoryview(bytearray(24)).cast("d") if cells is None else cells
        if not keep:
            self._cells[2] = time()

    def count(self, applied: bool) -> None:
        self._cells[0 if applied else 1] += 1
        if applied:
            self._cells[2] = time()

    def collect(self) -> Iterable[Metric]:
        counts = counter("firsttoken_config_reloads_total")
        counts.of[("applied",)].value, counts.of[("refused",)].value = self._cells[0], self._cells[1]
        yield from counts.collect()
        yield gauge("firsttoken_config_loaded_timestamp_seconds", [((), self._cells[2])])


class Reloader:
    """One reload at a time. `take` brings a configuration into force."""

    def __init__(self, config: Config, source: ConfigSource, take: Callable[[Config], Awaitable[None]]) -> None:
        self.config, self.source, self._take = config, source, take
        self.reloads = Reloads()
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        if self.source.files:
            self._spawn(self._watch())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def soon(self, why: str) -> None:
        """For whoever waits for no answer: it is in the log."""
        self._spawn(self._try(why))

    async def reload(self, why: str) -> Change:
        """Raises ConfigError; the configuration before is then still in force."""
        async with self._turn:
            try:
                found = await asyncio.to_thread(self.source.next, self.config)
                if found.changed:
                    await self._take(found.config)
            except ConfigError as error:
                self.reloads.count(applied=False)
                log.error(KEPT, why, error)
                raise
            self.config = found.config
            self.reloads.count(applied=True)
            told(found, why)
            return found

    async def posted(self) -> web.Response:
        """POST /reload. Raises ApiError."""
        try:
            return json_response(200, encode(said(await self.reload("POST /reload"))))
        except ConfigError as error:
            raise refused(str(error)) from None

    async def _try(self, why: str) -> None:
        try:
            await self.reload(why)
        except ConfigError:
            return  # it was said
        except Exception:
            log.exception("the configuration could not be reloaded (%s)", why)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            if await asyncio.to_thread(self.source.look):
                await self._try("a file changed")

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def said(found: Change) -> dict[str, object]:
    """The answer to whoever asked for it."""
    return {"result": "applied" if found.changed else "unchanged", "changed": found.changed, "restart": found.restart}


def refused(lines: str) -> ApiError:
    return ApiError(400, lines, code="invalid_config")


def told(found: Change, why: str) -> None:
    """In the log."""
    if found.changed:
        log.info("the configuration was reloaded (%s): %s", why, ", ".join(found.changed))
    if found.restart:
        log.warning("these changes need a restart, and have no effect until then: %s", ", ".join(found.restart))
    if not (found.changed or found.restart):
        log.info("the configuration was reloaded (%s): nothing has changed", why)
