"""A family of metrics as copied by a scrape."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from prometheus_client.core import Metric
from prometheus_client.samples import Sample


class CollectedFamily(Metric):
    """Copy of a family at collection time. Any thread may read the samples."""

    def __init__(self, name: str, doc: str, type: str, made: Callable[[], Metric]) -> None:
        super().__init__(name, doc, type)
        del self.samples  # the empty list of the library's constructor
        self._made = made

    @cached_property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        return self._made().samples
