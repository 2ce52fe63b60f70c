"""Learns from refusals (400, 422) what servers do not accept, and retries with a changed body.

Rules:
- A refusal that names a member, a value, a role or a form is mended: the request is sent again to the endpoint, not
  counted in `max_attempts`, changed by the table of refusals (`backends.lessons`). Servers name one member at a time: a
  request may be mended MOST_MENDS times per endpoint before the deadline, each time with a different body.
- A lesson is what has helped: the server has not repeated its complaint about the changed body, and has answered the
  request in the end. Lessons are stored by pool, model and operation (`policies.lessons.lesson_book`). Later bodies are
  changed before sending, for the callers for whom the lesson counts. Without keys no caller has lessons of its own.
- A caller's unchanged body refused on its merits is refused. A refusal of a body or a member written by the gateway
  goes to another pool, and so does a request for a feature that the server lacks.
- Content left out is named in x-firsttoken-left-out; the Record has the lessons.
- Each process learns for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import msgspec
from msgspec import Raw

from backends.body_changes import BodyChange, ChangeKind, Scalar, holds, meets
from backends.facts.lookup import with_overrides
from backends.facts.model_facts import Facts
from backends.interface import FailureKind, Operation
from backends.lessons.refusal import Complaint, Lesson, Reading, RefusalVerdict, read_refusal
from gateway.api.inference_request import InferenceRequest, TranslatedBody
from gateway.api.operation_fit import Servers
from gateway.core.hooks import NO_HOOKS, Ask, Hooks, RoutePlan
from gateway.core.part import Part
from gateway.observe.columns import Column, Note
from gateway.observe.record import Record
from gateway.upstream.answer_hooks import Remedy
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.race import Race
from gateway.upstream.routed_request import RoutedRequest, header_safe
from gateway.wiring import Core
from policies.lessons.lesson_book import KnownLesson, LessonBook, Place
from policies.routes.route import Route

log = logging.getLogger("firsttoken")

TAUGHT = (Operation.CHAT, Operation.COMPLETION, Operation.MESSAGES, Operation.RESPONSES)
ON_ITS_MERITS = (RefusalVerdict.MERITS, RefusalVerdict.UNREAD)  # of a caller's own body
MOST_MENDS = 8  # of a request at an endpoint
MOST_MADE_UP = 3  # of those for members that no dialect names: each may cost a request of a provider's limit
MOST_COMPARED = 1 << 16  # bytes of an answered body that is compared with lessons in question
MOST_FACTS = 512  # of models, by lessons
_members = msgspec.json.Decoder(dict[str, Raw]).decode


Applied = tuple[Place, Lesson]  # where a lesson was learned, and the lesson
Believed = tuple[tuple[str, tuple[Scalar, ...]], ...]  # values of facts, by name


@dataclass(frozen=True, slots=True)
class Mended:
    """A change after a refusal of the request. `helped`: the endpoint has not repeated its complaint."""

    applied: Applied
    complaint: Complaint
    helped: bool = True


@dataclass(slots=True)
class AppliedLessons:
    """Lessons by which the bodies of a request are changed, by pool. `mended`: by endpoint."""

    by_pool: dict[str, tuple[Applied, ...]] = field(default_factory=dict)
    mended: dict[str, list[Mended]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaughtForm:
    """A form of the request for a pool. `body`: a rebuilt body; None: the request's body."""

    lessons: tuple[Applied, ...]
    body: TranslatedBody | None = None

    @property
    def changes(self) -> tuple[BodyChange, ...]:
        return tuple(change for _, lesson in self.lessons for change in lesson.changes)

    def put(self, request: InferenceRequest, record: Record, pool: str) -> AppliedLessons:
        """The pool is asked in this form from here on."""
        request.changes = {**request.changes, pool: self.changes}
        if self.body is not None:
            request.translated = {**request.translated, pool: self.body}
        if (applied := APPLIED.of(record)) is None:
            APPLIED.put(record, applied := AppliedLessons())
        applied.by_pool[pool] = self.lessons
        return applied


APPLIED = Note[AppliedLessons | None](None)


def _applied_at(record: Record, pool: str) -> tuple[Applied, ...]:
    applied = APPLIED.of(record)
    return () if applied is None else applied.by_pool.get(pool, ())


def _told(record: Record) -> list[str]:
    return [str(lesson) for _, lesson in _applied_at(record, record.endpoint.pool)]


class LessonsPart(Part):
    columns = (Column("lessons", "", _told, "of refusals, by which the request was changed for the last pool asked"),)

    def __init__(self, core: Core) -> None:
        self._runtime = core.runtime
        self._operations = core.dispatcher.operations
        self._book: LessonBook[Lesson] = LessonBook()
        self._facts: dict[tuple[int, Believed], tuple[Facts, Facts]] = {}
        self._sections = core.config.pools

    def on(self, plan: RoutePlan) -> Hooks:
        return Hooks(fit=self.fit, mend=self, ended=self.ended) if plan.operation in TAUGHT else NO_HOOKS

    def reload(self) -> None:
        """Forget lessons of removed or changed pools: the servers may be different."""
        before, self._sections = self._sections, self._runtime.current.config.pools
        self._book.keep(lambda pool: pool in before and before[pool] == self._sections.get(pool))

    def pool_members(self, pool: str) -> Mapping[str, Any]:
        return {"lessons": [_lesson_view(each) for each in self._book.known(pool, monotonic())]}

    # -- before the attempts ----------------------------------------------------------------

    def fit(self, ask: Ask) -> None:
        """Apply the lessons that count for the caller to the bodies for pools."""
        request, record = ask.request, ask.timeline.record
        if request.changes:  # of the configuration before a reload
            request.changes = {}
            APPLIED.take(record)
        if not (self._book.own or self._book.shared):
            return
        for pool in ask.route.pools:
            model = ask.named.model or ask.route.variants.get(pool, ask.runtime.pools[pool].model)
            place = Place(pool, model, _spoken(request, pool).value)
            form = self._form(request, ask.route, ask.runtime.servers(ask.named.model), place)
            if form.lessons:
                form.put(request, record, pool)

    def _form(self, request: InferenceRequest, route: Route, servers: Servers, place: Place) -> TaughtForm:
        found = self._counting(request, place)
        sent = _body(request, place.pool)
        for lesson in (each for _, each in found if each.operation and meets(sent, each.beside)):
            if (form := self._form_elsewhere(request, route, servers, place, lesson, found)) is not None:
                return form
        lessons = _of_bodies(found)
        body = self._body_of(request, route, servers, place.pool, _spoken(request, place.pool), lessons)
        return TaughtForm(lessons, body)

    def _form_elsewhere(
        self,
        request: InferenceRequest,
        route: Route,
        servers: Servers,
        place: Place,
        lesson: Lesson,
        here: Sequence[Applied],
    ) -> TaughtForm | None:
        """The body for another operation of the pool; None: not spoken there, or the request cannot be expressed.
        `here`: lessons of the present operation, of which facts on names and ids also apply to the other operation."""
        spoken = servers.native.get(place.pool, ())
        wanted = next((each for each in spoken if each.value == lesson.operation), None)
        if wanted is None:
            return None
        there = _of_bodies(self._counting(request, replace(place, operation=wanted.value)))
        known = {each for _, each in there}
        there += tuple(each for each in here if each[1] not in known and _believed([each]))
        body = self._body_of(request, route, servers, place.pool, wanted, there, _refused(here))
        return None if body is None else TaughtForm(((place, lesson), *there), body)

    def _body_of(
        self,
        request: InferenceRequest,
        route: Route,
        servers: Servers,
        pool: str,
        operation: Operation,
        lessons: Sequence[Applied],
        refused: frozenset[str] = frozenset(),
    ) -> TranslatedBody | None:
        """A body by other facts, or of another operation; None: that of the request stays."""
        believed = _believed(lessons)
        if not believed and operation is _spoken(request, pool):
            return None
        server = servers.of(pool, frozenset({operation}), self._with(servers.facts(pool), believed))
        return self._operations.made_for(server, request, route, refused | _refused(lessons))

    def _with(self, facts: Facts, believed: Believed) -> Facts:
        """Facts by lessons: one object for each, by which plans are known."""
        if not believed:
            return facts
        key = id(facts), believed
        if (known := self._facts.get(key)) is not None and known[0] is facts:
            return known[1]
        if len(self._facts) >= MOST_FACTS:
            self._facts.clear()
        self._facts[key] = facts, (found := with_overrides(facts, _as_overrides(believed)))
        return found

    def _counting(self, request: InferenceRequest, place: Place) -> Sequence[Applied]:
        return [(place, lesson) for lesson in self._book.of(place, self._caller(request), monotonic())]

    def _caller(self, request: InferenceRequest) -> str:
        """Empty without keys: an address may be that of a proxy, with any number of callers."""
        return request.caller if self._runtime.current.keys.required else ""

    # -- refusals ---------------------------------------------------------------------------

    def refused(self, routed: RoutedRequest, wire: WireAttempt) -> Remedy:
        if wire.failure is None or wire.failure.kind is not FailureKind.CLIENT:
            return Remedy.NONE
        _note_repeated(routed, wire)
        reading = read_refusal(wire.refusal, _members(wire.call.body), wire.call.body)
        is_own = _is_own(routed, wire, reading)
        lesson = None if reading.in_doubt and is_own else reading.lesson
        form = None if lesson is None else self._other_form(routed, wire, lesson)
        if lesson is not None and form is not None:
            return self._mended(routed, wire, Mended((_place(wire), lesson), reading.complaint), form)
        is_final = is_own and (reading.in_doubt or reading.verdict in ON_ITS_MERITS)
        return Remedy.NONE if is_final else Remedy.ELSEWHERE

    def _other_form(self, routed: RoutedRequest, wire: WireAttempt, lesson: Lesson) -> TaughtForm | None:
        """None: the server would get the same once more."""
        place, request = _place(wire), routed.request
        applied = _applied_at(routed.timeline.record, place.pool)
        if lesson.operation:
            if lesson.operation == place.operation:
                return None
            return self._form_elsewhere(request, routed.route, routed.servers, place, lesson, applied)
        lessons = (*(each for each in applied if each[1] != lesson), (place, lesson))
        operation = wire.request.operation
        form = TaughtForm(lessons, self._body_of(request, routed.route, routed.servers, place.pool, operation, lessons))
        return None if _written(wire, form.body, form.changes) == wire.call.body else form

    def _mended(self, routed: RoutedRequest, wire: WireAttempt, mended: Mended, form: TaughtForm) -> Remedy:
        """The endpoint is asked again, unless it was often enough."""
        place, lesson = mended.applied
        endpoint, known = wire.attempt.candidate.endpoint.id, APPLIED.of(routed.timeline.record)
        before = [] if known is None else known.mended.get(endpoint, [])
        made_up = sum(not each.applied[1].concerns_all for each in (*before, mended))
        if len(before) >= MOST_MENDS or made_up > MOST_MADE_UP:
            return Remedy.ELSEWHERE
        log.info("pool %s refuses a request for %s: %s", place.pool, header_safe(place.model), lesson)
        applied = form.put(routed.request, routed.timeline.record, place.pool)
        applied.mended.setdefault(endpoint, []).append(mended)
        return Remedy.AGAIN

    # -- answers ----------------------------------------------------------------------------

    def answered(self, routed: RoutedRequest, wire: WireAttempt) -> None:
        """Remember what has helped this request: changes of the answered body, or of the operation it has left."""
        now, caller, endpoint = monotonic(), self._caller(routed.request), wire.attempt.candidate.endpoint
        if (known := APPLIED.of(routed.timeline.record)) is None:
            return
        sent = known.by_pool.get(endpoint.pool, ())
        left = {place for place, lesson in sent if lesson.operation}
        for each in known.mended.get(endpoint.id, ()):
            place, lesson = each.applied
            if each.helped and not lesson.once and (each.applied in sent or place in left):
                self._book.helped(place, caller, lesson, now, concerns_all=lesson.concerns_all)

    def ended(self, ask: Ask, race: Race) -> None:
        """An answer to a body that a lesson would have changed contradicts the lesson."""
        wire = race.winner
        if not self._book.witnessed or wire is None or len(wire.call.body) > MOST_COMPARED:
            return
        for lesson in self._book.in_question(place := _place(wire), monotonic()):
            if self._would_change(race.routed, wire, lesson):
                self._book.contradicted(place, lesson)

    def _would_change(self, routed: RoutedRequest, wire: WireAttempt, lesson: Lesson) -> bool:
        if lesson.operation:
            return not lesson.beside or meets(wire.request.body, lesson.beside)
        return self._other_form(routed, wire, lesson) is not None


# --------------------------------------------------------------------------- attempts


def _note_repeated(routed: RoutedRequest, wire: WireAttempt) -> None:
    """Changes after which the endpoint says the same again have not helped."""
    known, endpoint = APPLIED.of(routed.timeline.record), wire.attempt.candidate.endpoint.id
    if known is not None and endpoint in known.mended:
        known.mended[endpoint] = [
            replace(each, helped=each.helped and not each.complaint.is_in(wire.refusal))
            for each in known.mended[endpoint]
        ]


def _is_own(routed: RoutedRequest, wire: WireAttempt, reading: Reading) -> bool:
    """The refused body is the caller's, and so is the refused member."""
    pool = wire.attempt.candidate.endpoint.pool
    if pool in routed.request.translated or _applied_at(routed.timeline.record, pool):
        return False
    return not reading.member or holds(wire.request.body, reading.member)


def _written(wire: WireAttempt, other: TranslatedBody | None, changes: Sequence[BodyChange]) -> bytes:
    """Body bytes for the server with other changes. `other` None: the attempt's own body."""
    body = wire.request.body if other is None else other.body
    return wire.upstream.backend.call(replace(wire.request, body=body, changes=tuple(changes))).body


def _place(wire: WireAttempt) -> Place:
    return Place(wire.attempt.candidate.endpoint.pool, wire.request.model, wire.request.operation.value)


# --------------------------------------------------------------------------- requests


def _spoken(request: InferenceRequest, pool: str) -> Operation:
    translated = request.translated.get(pool)
    return request.operation if translated is None else translated.operation


def _body(request: InferenceRequest, pool: str) -> Mapping[str, Any]:
    translated = request.translated.get(pool)
    return request.body if translated is None else translated.body


def _believed(lessons: Iterable[Applied]) -> Believed:
    """Facts for a rebuilt body; the latest value of each fact."""
    changes = (change for _, each in lessons for change in each.changes if change.kind is ChangeKind.FIT)
    return tuple({change.path: change.values for change in changes}.items())


def _as_overrides(believed: Believed) -> dict[str, Any]:
    """Convert to the format of a pool's `accepts`."""
    written: dict[str, Any] = {}
    for path, values in believed:
        name, _, inner = path.partition(".")
        value: Any = values[0] if len(values) == 1 else [*values]
        if inner:
            written.setdefault(name, {})[inner] = value
        else:
            written[name] = value
    return written


def _refused(lessons: Iterable[Applied]) -> frozenset[str]:
    """Members at the top of bodies."""
    changes = (change for _, each in lessons for change in each.changes if change.kind is ChangeKind.LEAVE_OUT)
    return frozenset(change.path for change in changes if "." not in change.path and not change.beside)


def _of_bodies(found: Iterable[Applied]) -> tuple[Applied, ...]:
    return tuple(each for each in found if not each[1].operation)


def _lesson_view(known: KnownLesson[Lesson]) -> dict[str, Any]:
    return {
        "model": known.place.model,
        "operation": known.place.operation,
        "lesson": str(known.lesson),
        "callers": known.callers or "all",
        "left_s": round(known.left),
    }
