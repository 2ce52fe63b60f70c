"""How much of a prompt each engine's cache holds: what was sent there, and what the engine says of it.

Rules, for the blocks that a prompt shares with those sent to an endpoint before:
- Under way: the last prompt that used them has not ended. They count, whatever the events say: the engine
  computes them first.
- Anchored: the prompt that used them last is tied to the engine's own chain. They count as far as that chain is
  held. Of blocks of ours past the chain's prompt, all or none.
- Neither (no events, or a prompt that could not be tied): they count until the endpoint's capacity, and what its
  answers bear out, say otherwise (`policies.prefix_cache.prefix_index`).
So the larger of both wins where the engine cannot know yet, and the engine wins where it does.
- What an answer reports as cached was held, whatever the events say.
- A gap in the events unties every anchor; a restart or a cleared cache forgets all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from policies.prefix_cache.block_tree import Chain
from policies.prefix_cache.chain_binding import AnswerReuse, ChainBinding
from policies.prefix_cache.prefix_index import PrefixIndex, PrefixStatistics
from policies.prefix_cache.residency import Residency, ResidencyStatistics
from policies.types import PoolEstimate

LATE = 64  # prompts of one endpoint that ended before their last event came


@dataclass(slots=True)
class PendingPrompt:
    """A prompt on its way, or on record until its last event comes."""

    endpoint: str
    prompt: PoolEstimate
    depth: int  # blocks believed held when it was sent
    stamp: int  # of its record in the index
    after: ChainBinding | None = None  # of the prompt that it shares them with
    tokens: int = 0  # once it was answered
    cached: int | None = None
    computed: int = 0  # tokens, as far as events tell, of one that was not answered

    @property
    def block_tokens(self) -> float:
        """The engine's in one block of ours."""
        return self.prompt.blocks.size * self.prompt.blocks.scale


class PrefixCaches:
    """Beliefs about the prefix caches of a fleet."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._engines: dict[str, Residency] = {}
        self._late: dict[str, OrderedDict[Hashable, PendingPrompt]] = {}
        self._echoes: dict[str, AnswerReuse] = {}

    # ----------------------------------------------------------------- read by decisions

    def hit(self, endpoint_id: str, prompt: PoolEstimate, block: int) -> int:
        """Leading tokens of the prompt (the engine's) believed cached: whole blocks of so many, and always less than
        the prompt."""
        depth, anchor, stamp = self.index.find(endpoint_id, prompt.blocks.hashes)
        if not depth:
            return 0
        if anchor is None or stamp in self._engines[endpoint_id].pending_stamps:
            held = depth * prompt.blocks.size * prompt.blocks.scale
        else:
            held = anchor.cached_tokens(depth, prompt)
        most = prompt.tokens - 1
        return (int(held) if held < most else most) // block * block if held else 0

    def statistics(self, endpoint_id: str) -> tuple[PrefixStatistics, ResidencyStatistics | None]:
        engine = self._engines.get(endpoint_id)
        return self.index.statistics(endpoint_id), None if engine is None else engine.statistics()

    # ----------------------------------------------------------------- told of our prompts

    def on_sent(self, key: Hashable, endpoint_id: str, prompt: PoolEstimate, session: str) -> PendingPrompt:
        depth, anchor, stamp = self.index.enter(endpoint_id, prompt.blocks.hashes)
        if (engine := self._engines.get(endpoint_id)) is not None:
            engine.on_sent(key, session, stamp)
        return PendingPrompt(endpoint_id, prompt, depth, stamp, anchor)

    def on_answered(self, key: Hashable, sent: PendingPrompt, tokens: int | None, cached: int | None) -> bool:
        """Its prompt was computed. Whether the engine's events account for it, now or shortly."""
        engine = self._engines.get(sent.endpoint)
        if engine is None:
            return False
        engine.on_ended(sent.stamp)
        sent.tokens, sent.cached = tokens or sent.prompt.tokens, cached
        if sent.after is not None and cached is not None:
            sent.after.observe_turn(sent.depth, sent.prompt, cached)
        if self._tie(key, sent, engine):
            return True
        return self._await(key, sent, engine)

    def on_unanswered(self, key: Hashable, sent: PendingPrompt) -> None:
        """It ended before its first token: what the engine is not known to have computed is not there."""
        self.index.trim(sent.endpoint, sent.prompt.blocks.hashes, sent.depth, sent.stamp)
        engine = self._engines.get(sent.endpoint)
        if engine is not None:
            engine.on_ended(sent.stamp)
            self._tie_part(key, sent, engine)
            self._await(key, sent, engine)

    # ----------------------------------------------------------------- told of engines

    def enable_events(self, endpoint_id: str) -> Residency:
        """The engine publishes its events."""
        self._late[endpoint_id], self._echoes[endpoint_id] = OrderedDict(), AnswerReuse()
        engine = self._engines[endpoint_id] = Residency()
        return engine

    def disable_events(self, endpoint_id: str) -> None:
        """It does so no longer: what was sent there stands."""
        if self._engines.pop(endpoint_id, None) is not None:
            del self._late[endpoint_id], self._echoes[endpoint_id]
            self.index.unbind(endpoint_id)

    def residency(self, endpoint_id: str) -> Residency | None:
        """Of an endpoint that publishes events."""
        return self._engines.get(endpoint_id)

    def on_events(self, endpoint_id: str) -> None:
        """Events came: prompts that ended before may be complete now."""
        engine, late = self._engines.get(endpoint_id), self._late.get(endpoint_id)
        if engine is not None and late:
            for key, sent in [*late.items()]:
                if self._tie(key, sent, engine) if sent.tokens else self._tie_part(key, sent, engine):
                    del late[key]

    def on_event_gap(self, endpoint_id: str) -> None:
        """Events were lost: what was removed meanwhile is not known."""
        if (engine := self._engines.get(endpoint_id)) is not None:
            engine.clear()
            self._give_up_late(endpoint_id, engine)
            self.index.unbind(endpoint_id)

    def clear(self, endpoint_id: str) -> None:
        """The endpoint lost its cache."""
        self.index.clear(endpoint_id)
        if (engine := self._engines.get(endpoint_id)) is not None:
            engine.clear()
            self._give_up_late(endpoint_id, engine)

    def remove(self, endpoint_id: str) -> None:
        """The endpoint is gone for good."""
        self.index.remove(endpoint_id)
        for known in (self._engines, self._late, self._echoes):
            known.pop(endpoint_id, None)

    # ----------------------------------------------------------------- anchors

    def _tie(self, key: Hashable, sent: PendingPrompt, engine: Residency) -> bool:
        answered = engine.chain(key, sent.tokens, sent.cached) or self._shared(sent)
        chain = answered and answered.truncated(sent.tokens)
        if chain is None or answered is None:
            return False
        if sent.cached is not None:
            engine.mark_cached(chain, sent.cached)
        prompt, hashes = sent.prompt, sent.prompt.blocks.hashes
        anchor = ChainBinding(
            chain,
            answered,
            sent.tokens,
            len(hashes),
            sent.block_tokens * sent.tokens / prompt.tokens,
            prompt.messages,
            self._echoes[sent.endpoint],
        )
        self.index.bind(sent.endpoint, hashes, anchor)
        engine.forget(key)
        engine.anchored += 1
        return True

    def _tie_part(self, key: Hashable, sent: PendingPrompt, engine: Residency) -> bool:
        """As far as the prompt was computed; an engine that is told to stop may still finish a step or two."""
        chain, hashes, size = engine.chain(key, sent.prompt.tokens, None), sent.prompt.blocks.hashes, sent.block_tokens
        if chain is None or chain.depth <= sent.computed:
            return False
        sent.computed, resident = chain.depth, chain.resident_tokens()
        blocks = min(int(resident / size), len(hashes))
        self.index.trim(sent.endpoint, hashes, blocks, sent.stamp)
        if blocks:
            self.index.bind(sent.endpoint, hashes[:blocks], ChainBinding(chain, chain, resident, blocks, size))
        return False

    def _await(self, key: Hashable, sent: PendingPrompt, engine: Residency) -> bool:
        """Whether its events may still come."""
        late = self._late[sent.endpoint]
        if not engine.awaits_events(key):
            self._give_up(key, sent, engine)
            return False
        late[key] = sent
        if len(late) > LATE:
            self._give_up(*late.popitem(last=False), engine)
        return True

    def _shared(self, sent: PendingPrompt) -> Chain | None:
        """A prompt of which all but the last tokens were cached stores nothing: its chain is known already."""
        _, anchor, _ = self.index.find(sent.endpoint, sent.prompt.blocks.hashes)
        if anchor is None or sent.cached is None:
            return None
        size = anchor.answered.tip.size
        return anchor.answered if sent.cached == sent.tokens // size * size else None

    def _give_up(self, key: Hashable, sent: PendingPrompt, engine: Residency) -> None:
        engine.forget(key)
        engine.unanchored += sent.tokens > 0

    def _give_up_late(self, endpoint_id: str, engine: Residency) -> None:
        late = self._late[endpoint_id]
        while late:
            self._give_up(*late.popitem(), engine)
