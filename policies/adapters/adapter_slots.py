"""LoRA adapters believed loaded in an engine, and the time to load another.

Rules, as in vLLM (--max-loras) and SGLang (--max-loras-per-batch):
- An engine holds as many adapters as it has slots; the least recently used one makes room for another.
- While running requests use all slots for other adapters, a request waits for the end of one.
- An adapter is believed loaded from the sending of a request for it. The engine loads one after another and computes
  nothing meanwhile, so all requests sent during a load wait for its rest.
- The adapters of running requests, as reported by the engine, are loaded: other gateways use the engine too.
- A first token behind a load teaches the time of a load, once the engine's own speed is known.
- An engine that does not know an adapter is not asked for it for UNKNOWN seconds, as operators load adapters while it
  runs; its other models are not affected.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from policies.types import NEVER
from policies.variants import LOADED, UNKNOWN, VariantSlots, VariantWait

WEIGHT = 1 / 8  # of the latest load
MAX_LOAD = 30.0  # s: a longer wait had other reasons


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """LoRA adapters of a pool's engines; implements `policies.variants.Variants`."""

    names: frozenset[str]
    slots: int  # held by an engine at a time, until reported
    load_s: float  # s to load an adapter, until learned

    def new_slots(self) -> VariantSlots:
        return AdapterSlots(self)


class AdapterSlots(VariantSlots):
    """Adapters believed loaded in one engine."""

    def __init__(self, facts: AdapterFacts) -> None:
        self.facts = facts
        self.load_s = facts.load_s
        self.slots = facts.slots
        self.unknown: dict[str, float] = {}  # adapters that the engine does not know: until when
        self._running: Counter[str] = Counter()  # requests by adapter
        self._answer_s = 0.0  # mean, from sending to end
        self._loaded = OrderedDict[str, None]()  # least recently used first
        self._loading, self._ready_at = "", NEVER  # the latest adapter to load, and the end of all loads

    @property
    def loaded(self) -> tuple[str, ...]:
        """Least recently used first."""
        return tuple(self._loaded)

    def wait(self, variant: str, now: float) -> VariantWait:
        """For the variant, of a request sent now."""
        rest = self._ready_at - now if self._ready_at > now else 0.0
        if variant in self._loaded:
            return VariantWait(rest) if rest else LOADED
        is_full = len(self._running) >= self.slots and variant not in self._running
        ahead = self._answer_s / self.slots if is_full else 0.0
        return VariantWait(rest + ahead + self.load_s, self.load_s)

    def on_sent(self, variant: str, now: float) -> VariantWait:
        """A request for the variant is sent."""
        wait = self.wait(variant, now)
        self._running[variant] += 1
        self._use(variant)
        if wait.load_s:
            self._loading, self._ready_at = variant, max(self._ready_at, now) + wait.load_s
        return wait

    def on_ended(self, variant: str, seconds: float) -> None:
        """A request for the variant has ended, so long after its sending."""
        self._answer_s += (seconds - self._answer_s) * WEIGHT
        self._running[variant] -= 1
        if self._running[variant] <= 0:
            del self._running[variant]

    def on_answer(self, variant: str) -> None:
        """The variant answers."""
        if variant == self._loading:
            self._ready_at = NEVER
        if variant in self.unknown:
            self.unknown = {name: until for name, until in self.unknown.items() if name != variant}

    def learn(self, load_s: float) -> None:
        """A request waited for the load of its adapter for so long, s."""
        self.load_s += (min(max(load_s, 0.0), MAX_LOAD) - self.load_s) * WEIGHT

    def on_unknown(self, variant: str, now: float) -> None:
        """The engine has refused the adapter's name."""
        self._loaded.pop(variant, None)
        if variant == self._loading:
            self._ready_at = NEVER
        self.unknown = {name: until for name, until in self.unknown.items() if until > now}
        self.unknown[variant] = now + UNKNOWN

    def on_scrape(self, running: Collection[str], slots: int | None) -> None:
        """`running`: adapters of the engine's running requests."""
        self.slots = slots or self.slots
        for adapter in running:
            if adapter in self.facts.names:
                self._use(adapter)

    def clear(self) -> None:
        """The engine has restarted."""
        self._loaded.clear()
        self._ready_at = NEVER
        self.unknown = {}

    def _use(self, adapter: str) -> None:
        self._loaded[adapter] = None
        self._loaded.move_to_end(adapter)
        while len(self._loaded) > self.slots:
            self._loaded.popitem(last=False)
