"""Remembers makers of signatures in answers relayed unchanged: a session that changes models drops foreign signatures.

Signatures and ciphers are those of thinking in Messages, and of `reasoning_details` in chat completions.

- Answers are not modified. The maker is stored by a digest of each signature: no text, no key.
- At most MOST digests per process; beyond, the oldest digest of the caller with most is dropped. An unknown signature
  stays in the request, and the server decides.
- Lookups ignore the caller: a signature is known only to callers who have seen its answer.
"""

from __future__ import annotations

from hashlib import blake2b

from backends.interface import Operation
from gateway.core.hooks import NO_HOOKS, Ask, Hooks, RoutePlan
from gateway.core.part import Part
from gateway.upstream.race import Race
from gateway.wiring import Core

MOST = 100_000  # signatures; 300 bytes each
_SIGNED = (Operation.MESSAGES, Operation.CHAT)


class Origins(Part):
    """Of answers by servers of the caller's dialect."""

    def __init__(self, core: Core) -> None:
        self._operations = core.dispatcher.operations
        self._makers: dict[bytes, str] = {}
        self._by_caller: dict[str, dict[bytes, None]] = {}  # digests, the oldest first
        self._by_count: dict[int, dict[str, None]] = {}  # callers with so many: the most is found in one step
        self._most = 0  # most digests of any caller

    def on(self, plan: RoutePlan) -> Hooks:
        speaks = any(plan.operation in plan.runtime.operations[pool] for pool in plan.route.pools)
        return Hooks(ended=self.ended) if plan.operation in _SIGNED and speaks else NO_HOOKS

    def ended(self, ask: Ask, race: Race) -> None:
        """Remember the signatures of the answer."""
        if race.winner is None or not (signatures := race.winner.tap.facts.signatures):
            return
        maker = ask.runtime.maker(ask.named.model, race.winner.attempt.candidate.endpoint.pool)
        for signature in signatures if maker else ():
            self._note(ask.request.caller, _digest(signature), maker)
        self._operations.recall = self.recall

    def recall(self, signature: str) -> str:
        """The maker of a signature; empty: not known."""
        return self._makers.get(_digest(signature), "")

    def _note(self, caller: str, digest: bytes, maker: str) -> None:
        if digest in self._makers:
            return
        self._makers[digest] = maker
        known = self._by_caller.setdefault(caller, {})
        known[digest] = None
        self._recount(caller, len(known) - 1, len(known))
        if len(self._makers) > MOST:
            self._forget_oldest(next(iter(self._by_count[self._most])))

    def _forget_oldest(self, caller: str) -> None:
        known = self._by_caller[caller]
        oldest = next(iter(known))
        del known[oldest], self._makers[oldest]
        if not known:
            del self._by_caller[caller]
        self._recount(caller, len(known) + 1, len(known))

    def _recount(self, caller: str, before: int, now: int) -> None:
        if before:
            del self._by_count[before][caller]
            if not self._by_count[before]:
                del self._by_count[before]
        if now:
            self._by_count.setdefault(now, {})[caller] = None
        self._most = now if now > self._most or self._most not in self._by_count else self._most


def _digest(signature: str) -> bytes:
    return blake2b(signature.encode("utf-8", "surrogatepass"), digest_size=16).digest()
