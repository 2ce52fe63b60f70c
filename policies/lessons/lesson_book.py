"""Lessons of refusals by place (a pool, its model, the operation spoken), with their evidence.

Rules:
- A refusal teaches a lesson for its own caller only. The lesson is on trial, and applies to the caller's next requests.
- A lesson is proven for the caller after answers to PROOFS changed bodies, and for all callers after such an answer to
  each of two callers: evidence of a single caller never changes another caller's requests.
- A lesson on trial is dropped if a changed body is refused as well.
- A trial lasts TRIAL seconds, a proven lesson LASTING seconds from proof; then the server is retested, as servers
  change.
- Limits: MOST_OWN lessons per caller, MOST_CALLERS callers, MOST_SHARED lessons per place, MOST_PLACES places. The
  oldest are dropped first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

PROOFS = 2  # answers to bodies changed by a lesson, of one caller
TRIAL = 600.0  # s
LASTING = 86_400.0  # s
MOST_OWN = 64  # over all pools, of which each may teach several
MOST_CALLERS = 1_000
MOST_SHARED = 32
MOST_PLACES = 256

L = TypeVar("L", bound=Hashable)
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Place:
    """`operation`: as spoken by the server."""

    pool: str
    model: str
    operation: str


@dataclass(slots=True)
class LessonEvidence:
    """`answered`: bodies changed by the lesson that were answered."""

    until: float
    answered: int = 0


@dataclass(frozen=True, slots=True)
class KnownLesson(Generic[L]):
    """A lesson as shown to the operator. `callers`: number affected; 0: all. `left`: seconds until retested."""

    place: Place
    lesson: L
    callers: int
    left: float


Own = dict[tuple[Place, L], LessonEvidence]


@dataclass(slots=True)
class LessonBook(Generic[L]):
    """Times are monotonic seconds, as given."""

    _own: dict[str, Own[L]] = field(default_factory=dict)  # by caller, the latest last
    _shared: dict[Place, dict[L, float]] = field(default_factory=dict)  # until when
    _first: dict[tuple[Place, L], str] = field(default_factory=dict)  # the first caller with an answer

    def __bool__(self) -> bool:
        return bool(self._own or self._shared)

    def of(self, place: Place, caller: str, now: float) -> list[L]:
        """Lessons that count for a request; lessons proven for all callers come first."""
        shared, own = self._shared.get(place, {}), self._own.get(caller, {})
        found = [lesson for lesson, until in shared.items() if now < until]
        mine = [lesson for (where, lesson), seen in own.items() if where == place and now < seen.until]
        return found + [lesson for lesson in mine if lesson not in found]

    def is_on_trial(self, place: Place, caller: str, lesson: L) -> bool:
        """More answers would prove it for the caller."""
        seen = self._own.get(caller, {}).get((place, lesson))
        return seen is not None and seen.answered < PROOFS

    # -- events -----------------------------------------------------------------------------

    def refused(self, place: Place, caller: str, lesson: L, now: float) -> None:
        """A refusal has taught the lesson."""
        self._drop_lapsed(place, caller, now)
        own = self._own.pop(caller, {})
        self._own[caller] = own
        own.setdefault((place, lesson), LessonEvidence(now + TRIAL)).until = now + TRIAL
        while len(own) > MOST_OWN:
            self._drop(caller, next(iter(own)))
        while len(self._own) > MOST_CALLERS:
            self._drop_caller(next(iter(self._own)))

    def answered(self, place: Place, caller: str, lesson: L, now: float) -> None:
        """A body that was changed by the lesson has got an answer."""
        seen = self._own.get(caller, {}).get((place, lesson))
        if seen is None:
            return
        seen.answered += 1
        if seen.answered == PROOFS:
            seen.until = now + LASTING
        if self._first.setdefault((place, lesson), caller) != caller:
            self._share(place, lesson, now)

    def failed(self, place: Place, caller: str, lesson: L) -> None:
        """A body changed by the lesson was refused, and the refusal taught nothing new."""
        seen = self._own.get(caller, {}).get((place, lesson))
        if seen is not None and not seen.answered:
            self._drop(caller, (place, lesson))

    def keep(self, is_kept: Callable[[str], bool]) -> None:
        """Forget the pools that are not kept."""
        for caller, own in list(self._own.items()):
            for key in [each for each in own if not is_kept(each[0].pool)]:
                self._drop(caller, key)
        self._shared = {place: known for place, known in self._shared.items() if is_kept(place.pool)}

    # -- views ------------------------------------------------------------------------------

    def known(self, pool: str, now: float) -> Iterator[KnownLesson[L]]:
        """List what counts at a pool, for all callers first."""
        for place, shared in self._shared.items():
            if place.pool == pool:
                yield from (
                    KnownLesson(place, lesson, 0, until - now) for lesson, until in shared.items() if now < until
                )
        callers: dict[tuple[Place, L], list[float]] = {}
        for own in self._own.values():
            for key, seen in own.items():
                if key[0].pool == pool and now < seen.until and key[1] not in self._shared.get(key[0], {}):
                    callers.setdefault(key, []).append(seen.until - now)
        for (place, lesson), left in callers.items():
            yield KnownLesson(place, lesson, len(left), max(left))

    # -- bounds -----------------------------------------------------------------------------

    def _share(self, place: Place, lesson: L, now: float) -> None:
        shared = self._shared.pop(place, {})
        self._shared[place] = shared
        shared[lesson] = now + LASTING
        for caller, own in list(self._own.items()):
            if (place, lesson) in own:
                self._drop(caller, (place, lesson))
        _keep_latest(shared, MOST_SHARED)
        _keep_latest(self._shared, MOST_PLACES)

    def _drop_lapsed(self, place: Place, caller: str, now: float) -> None:
        """The evidence of what has lapsed counts no more."""
        own, shared = self._own.get(caller, {}), self._shared.get(place, {})
        for key in [each for each, seen in own.items() if now >= seen.until]:
            self._drop(caller, key)
        for lesson in [each for each, until in shared.items() if now >= until]:
            del shared[lesson]

    def _drop(self, caller: str, key: tuple[Place, L]) -> None:
        own = self._own[caller]
        del own[key]
        if self._first.get(key) == caller:
            del self._first[key]
        if not own:
            del self._own[caller]

    def _drop_caller(self, caller: str) -> None:
        for key in list(self._own[caller]):
            self._drop(caller, key)


def _keep_latest(known: dict[K, V], most: int) -> None:
    while len(known) > most:
        del known[next(iter(known))]
