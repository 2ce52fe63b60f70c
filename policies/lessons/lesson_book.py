"""Lessons of refusals by place (a pool, its model, the operation spoken), with their evidence.

Rules:
- Evidence is the answer to a request that was refused and then changed by the lesson. Nothing else is remembered: not a
  refusal alone, and not an answer to a body that was changed before it was sent.
- Such an answer counts for its own caller for OWN seconds, and for all callers for SHARED seconds once a second witness
  agrees: another caller. Callers without a name have no lessons of their own, and are a second witness after APART
  seconds.
- An answer to a body that the lesson would have changed contradicts the lesson: the first witness counts no more.
- A lesson that has lapsed is learned anew, from a new refusal: servers change, and a wrong lesson ends by itself.
- Limits: MOST_OWN lessons per caller, of which MOST_OWN_HERE count at a place, MOST_CALLERS callers, MOST_SHARED
  lessons and MOST_WITNESSED witnesses per place, MOST_PLACES places. The oldest are dropped first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

OWN = 600.0  # s
SHARED = 3600.0  # s
APART = 60.0  # s, of two witnesses without a name
MOST_OWN = 64  # over all pools, of which each may teach several
MOST_OWN_HERE = 16  # of a caller at a place: each is looked for in each body
MOST_CALLERS = 1_000
MOST_SHARED = 32
MOST_WITNESSED = 8
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


@dataclass(frozen=True, slots=True)
class Witness:
    """The first caller for whom a lesson helped. `caller` empty: without a name."""

    caller: str
    at: float


@dataclass(frozen=True, slots=True)
class KnownLesson(Generic[L]):
    """A lesson as shown to the operator. `callers`: number affected; 0: all. `left`: seconds until it lapses."""

    place: Place
    lesson: L
    callers: int
    left: float


@dataclass(slots=True)
class LessonBook(Generic[L]):
    """Times are monotonic seconds, as given. A caller's name is empty where callers are not told apart."""

    own: dict[str, dict[tuple[Place, L], float]] = field(default_factory=dict)  # until when, by caller, latest last
    shared: dict[Place, dict[L, float]] = field(default_factory=dict)  # until when
    witnessed: dict[Place, dict[L, Witness]] = field(default_factory=dict)

    def of(self, place: Place, caller: str, now: float) -> list[L]:
        """Lessons that count for a request; lessons that count for all callers come first."""
        found = [lesson for lesson, until in self.shared.get(place, {}).items() if now < until]
        own = self.own.get(caller, {})
        mine = [lesson for (where, lesson), until in own.items() if where == place and now < until]
        return found + [lesson for lesson in mine[-MOST_OWN_HERE:] if lesson not in found]

    def in_question(self, place: Place, now: float) -> list[L]:
        """Lessons with one witness."""
        return [lesson for lesson, first in self.witnessed.get(place, {}).items() if now - first.at < OWN]

    # -- events -----------------------------------------------------------------------------

    def helped(self, place: Place, caller: str, lesson: L, now: float, *, concerns_all: bool) -> None:
        """A refused request was answered after the change. `concerns_all` False: other callers have no such member."""
        self._drop_lapsed(place, caller, now)
        if caller:
            self._keep_own(place, caller, lesson, now)
        if concerns_all:
            self._testify(place, caller, lesson, now)

    def contradicted(self, place: Place, lesson: L) -> None:
        """A body that the lesson would have changed was answered."""
        self._drop_witness(place, lesson)

    def keep(self, is_kept: Callable[[str], bool]) -> None:
        """Forget the pools that are not kept."""
        for caller, own in list(self.own.items()):
            for key in [each for each in own if not is_kept(each[0].pool)]:
                self._drop(caller, key)
        for known in (self.shared, self.witnessed):
            for place in [each for each in known if not is_kept(each.pool)]:
                del known[place]

    # -- views ------------------------------------------------------------------------------

    def known(self, pool: str, now: float) -> Iterator[KnownLesson[L]]:
        """List what counts at a pool, for all callers first."""
        for place, shared in self.shared.items():
            if place.pool == pool:
                yield from (
                    KnownLesson(place, lesson, 0, until - now) for lesson, until in shared.items() if now < until
                )
        callers: dict[tuple[Place, L], list[float]] = {}
        for own in self.own.values():
            for key, until in own.items():
                if key[0].pool == pool and now < until and now >= self.shared.get(key[0], {}).get(key[1], now):
                    callers.setdefault(key, []).append(until - now)
        for (place, lesson), left in callers.items():
            yield KnownLesson(place, lesson, len(left), max(left))

    # -- evidence ---------------------------------------------------------------------------

    def _keep_own(self, place: Place, caller: str, lesson: L, now: float) -> None:
        own = self.own.pop(caller, {})
        self.own[caller] = own
        own.pop((place, lesson), None)
        own[place, lesson] = now + OWN
        _keep_latest(own, MOST_OWN)
        _keep_latest(self.own, MOST_CALLERS)

    def _testify(self, place: Place, caller: str, lesson: L, now: float) -> None:
        first = self.witnessed.get(place, {}).get(lesson)
        if first is None or now - first.at >= OWN:
            self._note_witness(place, lesson, Witness(caller, now))
        elif first.caller != caller or (not caller and now - first.at >= APART):
            self._drop_witness(place, lesson)
            self._share(place, lesson, now)

    def _note_witness(self, place: Place, lesson: L, witness: Witness) -> None:
        known = self.witnessed.pop(place, {})
        self.witnessed[place] = known
        known.pop(lesson, None)
        known[lesson] = witness
        _keep_latest(known, MOST_WITNESSED)
        _keep_latest(self.witnessed, MOST_PLACES)

    def _drop_witness(self, place: Place, lesson: L) -> None:
        known = self.witnessed.get(place, {})
        known.pop(lesson, None)
        if not known:
            self.witnessed.pop(place, None)

    def _share(self, place: Place, lesson: L, now: float) -> None:
        shared = self.shared.pop(place, {})
        self.shared[place] = shared
        shared.pop(lesson, None)
        shared[lesson] = now + SHARED
        for caller, own in list(self.own.items()):
            if (place, lesson) in own:
                self._drop(caller, (place, lesson))
        _keep_latest(shared, MOST_SHARED)
        _keep_latest(self.shared, MOST_PLACES)

    def _drop_lapsed(self, place: Place, caller: str, now: float) -> None:
        for key in [each for each, until in self.own.get(caller, {}).items() if now >= until]:
            self._drop(caller, key)
        shared = self.shared.get(place, {})
        for lesson in [each for each, until in shared.items() if now >= until]:
            del shared[lesson]

    def _drop(self, caller: str, key: tuple[Place, L]) -> None:
        own = self.own[caller]
        del own[key]
        if not own:
            del self.own[caller]


def _keep_latest(known: dict[K, V], most: int) -> None:
    while len(known) > most:
        del known[next(iter(known))]
