"""The certificate of the data port, read again when its files change.

Rules:
- Established connections keep theirs; every handshake after a change presents the new certificate.
- Files that cannot be used (a key without its certificate yet, no file) change nothing and are logged, once for each
  version of the files. Metrics tell that, and when the certificate in force ends: a renewal that fails is seen before.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.config.server_tls import ServerTlsSection
from gateway.files import CHECK_INTERVAL, FileWatch
from gateway.observe.metrics.series import gauge

log = logging.getLogger("firsttoken")


class ServerCertificate(Collector):
    """`context` is for the listening socket. A worker inherits the object at the fork, with a certificate that works
    whatever has become of the files."""

    def __init__(self, section: ServerTlsSection) -> None:
        self._section = section
        self._watch = FileWatch(section.files)
        self._current = section.context()
        self._end = section.end()
        self._is_refused = False  # the latest version of the files
        self.context = section.context()
        self.context.sni_callback = self._select
        self._task: asyncio.Task[None] | None = None

    def _select(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called at every handshake, with or without a name."""
        connection.context = self._current

    def collect(self) -> Iterable[Metric]:
        yield gauge("firsttoken_certificate_end_timestamp_seconds", [((), self._end)])
        yield gauge("firsttoken_certificate_refused", [((), float(self._is_refused))])

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _follow(self) -> None:
        while True:
            if await asyncio.to_thread(self._watch.changed):
                await asyncio.to_thread(self.read)
            await asyncio.sleep(CHECK_INTERVAL)

    def read(self) -> None:
        """Blocks."""
        self._watch.begin_read()
        try:
            current, end = self._section.context(), self._section.end()
        except ValueError as error:
            self._is_refused = True
            log.error("server.tls: the files have changed, keeping the previous certificate: %s", error)
        else:
            self._current, self._end = current, end
            self._is_refused = False
            log.info("server.tls: the certificate was read again")
