"""A copy of the objects of one resource of the Kubernetes API, kept by list and watch.

Rules, of which each was broken by a client once:
- A watch goes on from the version of the list, of the last event or of the last bookmark, never from that of an item.
- 410 Gone, as a status or as an event in a watch, leads to a new list without a version. Once is usual; from the second
  time in a row on it is a failure.
- The copy stays while the API is away. After a failure the next try waits, longer each time, with jitter. A list that
  succeeds ends a failure of watches only if a watch then does.
- A watch has an end that it asks for, soon enough for a half-open connection not to be trusted for long: after silence
  beyond that end it is dead, and a list makes up for what it has not told.
- A list has an end: a server that names ever more pages is one that fails.
- An object that cannot be read stays as it was known, and holds up none behind it.
- Objects deleted while no watch was open are missing in the next list, which replaces the copy as a whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from random import uniform
from time import monotonic
from typing import Generic, TypeVar

import msgspec

from backends.kubernetes.objects import KubernetesObject, Metadata
from gateway.kubernetes.api_server import ApiServer, ApiServerError, SilentWatch

log = logging.getLogger("firsttoken")

PAGE = 500  # objects of a list in one reply
MAX_PAGES, MAX_IDLE_PAGES = 200, 10  # of a list; in a row without another object
WATCH = 20.0, 30.0  # s that a watch is asked to last: at random, so that not all end at once
OVERDUE = 5.0  # s beyond, without a byte
SHORT = 1.0  # s: a watch that ends sooner was cut, by the server or by a proxy
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # s between tries after failures
FORBIDDEN, GONE = 403, 410

Object = TypeVar("Object", bound=KubernetesObject)


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Page(msgspec.Struct):
    metadata: Metadata
    items: list[msgspec.Raw] | None = None


class Reflector(Generic[Object]):
    """`objects`: by name, once listed. `on_change`: called after every change of `objects`. `kind`: their type.
    `selector`: parameters that select objects."""

    def __init__(
        self,
        server: ApiServer,
        path: str,
        kind: type[Object],
        selector: Mapping[str, str],
        on_change: Callable[[], None],
    ) -> None:
        self.objects: Mapping[str, Object] = {}
        self.listed = False
        self._server, self._path = server, path
        self._kind, self._selector = kind, dict(selector)
        self._on_change = on_change
        self._version = ""  # empty: a list is due
        self._pause = FIRST_PAUSE
        self._failing = False
        self._lost = 0  # watches in a row that had no event and no end in time

    async def run(self) -> None:
        """Keep the copy, for ever."""
        while True:
            try:
                if not self._version:
                    await self._list()
                began = monotonic()
                await self._watch()
                if monotonic() - began < SHORT:
                    await self._wait()
                else:
                    self._watched()
            except Exception as error:  # a token that is no text, too: nobody would start the copy again
                self._on_failure(error, error.status if isinstance(error, ApiServerError) else 0)
                await self._wait()

    def _on_failure(self, error: Exception, status: int) -> None:
        lost = isinstance(error, SilentWatch)
        if lost or status == GONE:
            self._version = ""
            self._lost += 1
        if lost or status != GONE or self._lost > 1:
            self._log_failure(error, status)

    async def _wait(self) -> None:
        """Longer each time, until something was read."""
        await asyncio.sleep(uniform(self._pause / 2, self._pause))
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    async def _list(self) -> None:
        found: dict[str, Object] = {}
        params, idle = {**self._selector, "limit": str(PAGE)}, 0
        for _ in range(MAX_PAGES):
            page, before = await self._page(params), len(found)
            for item in page.items or ():
                if (one := self._read(item)) is not None:
                    found[one.metadata.name] = one
            idle = idle + 1 if len(found) == before else 0
            if not page.metadata.continue_:
                break
            if idle >= MAX_IDLE_PAGES or page.metadata.continue_ == params.get("continue"):
                raise ApiServerError("a list goes on without another object")
            params["continue"] = page.metadata.continue_
        else:
            raise ApiServerError(f"a list has more than {MAX_PAGES} pages")
        self._version = page.metadata.resource_version
        self._replace(found)
        if self._lost < 2:
            self._recovered()

    async def _page(self, params: Mapping[str, str]) -> _Page:
        return msgspec.json.decode(await self._server.read(self._path, params), type=_Page)

    def _replace(self, objects: Mapping[str, Object]) -> None:
        self.objects, self.listed = objects, True
        self._on_change()

    async def _watch(self) -> None:
        """Follow the changes to the end of one watch."""
        lasts = uniform(*WATCH)
        params = {
            **self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(round(lasts)),
        }
        async with aclosing(self._server.lines(self._path, params, lasts + OVERDUE)) as lines:
            async for line in lines:
                if line.strip():
                    self._on_event(msgspec.json.decode(line, type=_WatchEvent))
                    self._watched()

    def _on_event(self, event: _WatchEvent) -> None:
        """Raises ApiServerError for an event that is an error."""
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            raise ApiServerError(status.message or "the watch has failed", status.code)
        self._version = msgspec.json.decode(event.object, type=KubernetesObject).metadata.resource_version
        if event.type == "BOOKMARK" or (one := self._read(event.object)) is None:
            return
        others = {name: known for name, known in self.objects.items() if name != one.metadata.name}
        self._replace(others if event.type == "DELETED" else {**others, one.metadata.name: one})

    def _read(self, item: msgspec.Raw) -> Object | None:
        """Decode an object. Where decoding fails: the object as last known, or None. An error would start the watch
        again before this event, and hold up the events behind."""
        try:
            return msgspec.json.decode(item, type=self._kind)
        except msgspec.ValidationError as error:
            name = msgspec.json.decode(item, type=KubernetesObject).metadata.name
            log.warning("Kubernetes: %s of %s cannot be read (%s), and is left as it was", name, self._path, error)
            return self.objects.get(name)

    # -- the log ------------------------------------------------------------------------

    def _log_failure(self, error: Exception, status: int) -> None:
        if not self._failing:
            self._failing = True
            hint = "; the service account needs the verbs list and watch" if status == FORBIDDEN else ""
            kept = len(self.objects)
            log.warning(
                "Kubernetes: %s cannot be read (%s)%s; the %d known objects stay", self._path, error, hint, kept
            )

    def _watched(self) -> None:
        """A watch works: it has told an event, or has ended in time."""
        self._lost = 0
        self._recovered()

    def _recovered(self) -> None:
        self._pause = FIRST_PAUSE
        if self._failing:
            self._failing = False
            log.info("Kubernetes: %s can be read again", self._path)
