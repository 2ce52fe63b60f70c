"""A registry that can be asked for its collectors: some are read more cheaply than they are collected."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector


class Registry(CollectorRegistry):
    """In the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self.collectors.append(collector)

    def unregister(self, collector: Collector) -> None:
        super().unregister(collector)
        self.collectors.remove(collector)
