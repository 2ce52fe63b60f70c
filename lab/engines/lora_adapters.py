"""The LoRA adapters of a simulated engine.

Rules, as in vLLM (vllm/lora/model_manager.py, vllm/v1/core/sched/scheduler.py):
- An engine holds `slots` adapters; the least recently used one makes room for another.
- A step takes longer by `load` seconds for each adapter that is loaded in it, for all of its requests.
- A request waits while the running requests use all slots for other adapters; requests behind it may go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class LoraAdapters:
    names: set[str] = field(default_factory=set)
    slots: int = 1
    load: float = 0.3  # s
    loads: int = 0  # so far
    _held: OrderedDict[str, None] = field(default_factory=OrderedDict)  # least recently used first
    _due: int = 0  # loads in the next step

    def admits(self, adapter: str, running: Collection[str]) -> bool:
        """`running`: adapters of the running requests."""
        return adapter in running or len(running) < self.slots

    def holds(self, adapter: str) -> bool:
        return adapter in self._held

    def use(self, adapter: str, running: Collection[str]) -> None:
        """A request for the adapter is admitted."""
        if adapter not in self._held:
            self.loads += 1
            self._due += 1
            while len(self._held) >= self.slots:
                del self._held[next(held for held in self._held if held not in running)]
        self._held[adapter] = None
        self._held.move_to_end(adapter)

    def take_delay(self) -> float:
        """Seconds of loads since the last call."""
        due, self._due = self._due, 0
        return due * self.load

    def clear(self) -> None:
        """The engine restarted."""
        self._held.clear()
        self._due = 0
