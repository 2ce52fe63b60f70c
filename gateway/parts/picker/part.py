"""A second front of the core: places requests that Envoy carries, over gRPC on the port of the `pick` section."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from gateway.config.models import PickSection
from gateway.core.part import Part
from gateway.process import HANDLER_GRACE
from gateway.wiring import Core

if TYPE_CHECKING:
    from gateway.parts.picker.picker_service import PickerServer


class PickerPart(Part):
    """`server` None: the configuration has no port for it."""

    def __init__(self, core: Core) -> None:
        self._core, self._section = core, core.config.pick
        self.server: PickerServer | None = None
        if self._section is not None:
            self._build(self._section)

    def _build(self, section: PickSection) -> None:
        from gateway.parts.picker.llm_d_metrics import LlmDMetrics
        from gateway.parts.picker.picker import Picker
        from gateway.parts.picker.picker_service import PickerServer, PickerService

        core = self._core
        self.collectors = (LlmDMetrics(core.fleet.view.pool_of, core.monitor.loads, core.routes, core.queue.depth),)
        service = PickerService(
            Picker(core.runtime, core.decider, core.queue, section, core.dispatcher.waker),
            core.recorder,
            max_body=lambda: core.config.defaults.max_body,
            is_ready=lambda: not core.proxy.draining and core.decider.any_usable(monotonic()),
            intake=core.intake,
        )
        self.server = PickerServer(service, core.intake)

    @property
    def url(self) -> str:
        """Of its port; empty: there is none, or it is not open yet."""
        return "" if self.server is None else self.server.url

    async def open(self) -> None:
        if self.server is not None and self._section is not None:
            await self.server.start(self._section, shared=self._core.worker is not None)

    def drain(self) -> None:
        if self.server is not None:
            self.server.close()

    async def close(self) -> None:
        if self.server is not None:
            await self.server.stop(HANDLER_GRACE)
