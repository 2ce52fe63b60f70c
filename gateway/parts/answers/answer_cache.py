"""Answers kept for equal requests, on routes with a `cache`.

Rules:
- Equal: the same bytes, path, route and headers that reach an engine or a condition, of the same cache group. A route
  that a reload has changed, or whose pools have another model or send other members, has no answer yet.
- Kept: complete answers of status 200, whole and streamed, up to MAX_ANSWER bytes, as they went to the caller, with
  what their heads told of pool, model, a lowered limit and members left out.
- Only of the first tier that is suited for the request: an answer of a tier that stood in would stay after the first
  one is back. Never an empty answer, nor one that a filter or a failure has ended.
- Never of a request with the caller's own key for a provider, who pays for it.
- Only requests whose answers may repeat: `temperature: 0`, embeddings and rankings; with `any_temperature` all of chat,
  completions and Messages. Never Responses and threads, which name state of an engine, and never an answer with its
  cost.
- A caller may send `cache-control: no-cache`, for a new answer that is kept, or `no-store`, for one that is not.
- Looked up once key and quotas have let the request in: it counts as a request of its key, without tokens and cost.
- An answer from here counts in no objective, has no first token in the metrics and teaches no prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from time import monotonic, time

from pydantic import SecretStr

from backends.interface import Operation
from backends.stream.sound_answers import is_sound
from gateway.admission.route_table import Routes
from gateway.api.inference_request import InferenceRequest
from gateway.core.hooks import NO_HOOKS, Ask, Hooks, RoutePlan
from gateway.core.part import Part
from gateway.downstream.answer_headers import answer_head, changes_told
from gateway.downstream.http_request import HttpRequest
from gateway.observe.part_notes import CACHE, HIT, MISS, RESCUE, SHORTCOMING
from gateway.observe.record import RequestOutcome, Stage
from gateway.observe.timeline import RequestTimeline
from gateway.parts.answers.answer_copy import CacheUse, CopyBudget, CopyingRelay
from gateway.parts.answers.answer_stores import AnswerKey, KeptAnswer, answer_store
from gateway.runtime import Runtime
from gateway.upstream.answer import STALL, Relay
from gateway.upstream.race import Race
from gateway.upstream.routed_request import RoutedRequest
from gateway.wiring import Core
from policies.routes.route import AnswerCaching, Route
from policies.routing.first_choice import is_of_first_choice

MAX_REQUEST = 1 << 20  # bytes of a request that is looked up: hashed in 1 ms
SLICE = 64 << 10  # bytes written before the caller must read
SAMPLED = frozenset({Operation.CHAT, Operation.COMPLETION, Operation.MESSAGES})
UNSAMPLED = frozenset({Operation.EMBEDDINGS, Operation.RERANK, Operation.SCORE})
# Settings of a pool that change the request which a backend gets.
SENT = {"backend", "base_url", "model", "models", "rename", "drop", "headers", "query"}
HEADER = "x-firsttoken-cache"


class AnswerCache(Part):
    def __init__(self, core: Core) -> None:
        state = core.config.state
        self.store, self.copies = answer_store(state), CopyBudget(state.answer_bytes)
        self._forms: dict[str, tuple[Routes, str]] = {}  # by route: the routes in force, and the form

    async def start(self) -> None:
        self.store.start()

    async def close(self) -> None:
        await self.store.close()

    def on(self, plan: RoutePlan) -> Hooks:
        if plan.route.cache is None or plan.operation not in SAMPLED | UNSAMPLED:
            return NO_HOOKS
        return Hooks(answer=self.answer, placed=tell_missed, ended=self.keep)

    async def answer(self, ask: Ask) -> bool:
        """Replay the answer to an equal request; where there is none, have the answer copied."""
        if (use := self._use(ask)) is None:
            return False
        if (found := await self._find(use, ask.timeline)) is None:
            ask.relay = CopyingRelay(ask.http, self.copies, use)
            return False
        ask.timeline.end_stage(Stage.ADMIT)
        await self._replay(found, ask)
        return True

    def _use(self, ask: Ask) -> CacheUse | None:
        """None: the request is not for the cache."""
        request, http, caching = ask.request, ask.http, ask.route.cache
        control = http.headers.get("cache-control", "").lower()
        if caching is None or request.cache_groups or ask.rewrite is not None or "no-store" in control:
            return None
        if not is_repeatable(request, caching):
            return None
        group = sha256(b"group " + ask.tenant.cache_group.encode()).hexdigest()[:32]
        headers = sorted({**request.dialect_headers, **request.headers}.items())
        digest = sha256(
            repr((group, self._form(ask.route, ask.runtime), http.path, headers)).encode("utf-8", "backslashreplace")
        )
        digest.update(http.body)
        return CacheUse(AnswerKey(group, digest.hexdigest()), ask.route, caching.ttl, "no-cache" in control)

    def _form(self, route: Route, runtime: Runtime) -> str:
        """Digest of the route and of what its pools send, the same in all processes."""
        known, form = self._forms.get(route.name, (None, ""))
        if known is not runtime.routes or not form:
            pools = [runtime.config.pools[pool].model_dump(include=SENT) for pool in route.pools]
            form = sha256(repr(_ordered((route.model_dump(), pools))).encode()).hexdigest()
            self._forms[route.name] = runtime.routes, form
        return form

    async def _find(self, use: CacheUse, timeline: RequestTimeline) -> KeptAnswer | None:
        """The answer to be replayed at once. None also for a large one while copies take all their memory."""
        found = None if use.fresh else await self.store.find(use.key)
        if found is not None and len(found.body) > max(self.copies.left, SLICE):
            found = None
        CACHE.put(timeline.record, MISS if found is None else HIT)
        if found is not None:
            timeline.unjudged()
        return found

    async def _replay(self, answer: KeptAnswer, ask: Ask) -> None:
        """Write a kept answer as the caller reads it. It counts as a copy: the store may have dropped it."""
        self.copies.left -= len(answer.body)
        try:
            await replay(answer, ask.http, ask.request.stream, ask.timeline)
        finally:
            self.copies.left += len(answer.body)

    def keep(self, ask: Ask, race: Race) -> None:
        """Keep the answer that went to the caller, if it is complete and the route wants no better one."""
        relay, routed = ask.relay, race.routed
        if not isinstance(relay, CopyingRelay) or not relay.copy or routed.route is not relay.use.route:
            return
        record, use = ask.timeline.record, relay.use
        if record.end is RequestOutcome.COMPLETED and record.status == 200 and is_best(routed):
            body, told = bytes(relay.copy), tuple(changes_told(record))
            if is_sound(routed.request.operation, body, stream=record.asked.stream):
                kept = KeptAnswer(time(), relay.content_type, body, told, record.endpoint.pool, record.answer.model)
                self.store.put(use.key, kept, use.ttl)


def tell_missed(ask: Ask) -> None:
    """An engine is asked for the answer."""
    if isinstance(ask.relay, CopyingRelay):
        ask.http.lines = (*ask.http.lines, f"{HEADER}: miss")


def is_best(routed: RoutedRequest) -> bool:
    """The answer is of the first tier that is suited for the request, and of no other one: no fallback, no stand-in for
    a late tier, no answer for which a better one was asked, none that another endpoint has continued."""
    record, decision = routed.timeline.record, routed.decision
    if SHORTCOMING.of(record) or RESCUE.of(record) or (record.asked.stream and not record.answer.output_tokens):
        return False
    return is_of_first_choice(decision, routed.route.prefer, record.placed.tier)


def is_repeatable(request: InferenceRequest, caching: AnswerCaching) -> bool:
    if request.size > MAX_REQUEST or request.wants_cost:
        return False
    if request.operation in UNSAMPLED:
        return True
    return request.operation in SAMPLED and (caching.any_temperature or _temperature(request.body) == 0)


def _ordered(value: object) -> object:
    """With sets as lists, whose order differs between processes, and with what secrets hide."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Mapping):
        return sorted((str(name), _ordered(inner)) for name, inner in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return [_ordered(each) for each in value] if isinstance(value, (list, tuple)) else value


def _temperature(body: Mapping[str, object]) -> float | None:
    given = body.get("temperature")
    return given if isinstance(given, (int, float)) and not isinstance(given, bool) else None


async def replay(answer: KeptAnswer, http: HttpRequest, stream: bool, timeline: RequestTimeline) -> None:
    """Write a kept answer as the caller reads it. A caller that stalls is disconnected."""
    age = max(int(time() - answer.stored_at), 0)
    own = (f"{HEADER}: hit; age={age}", f"age: {age}", "x-firsttoken-cost-usd: 0.00000000")
    http.lines = (*http.lines, *answer.lines, *own)
    if not http.http11:
        http.keep_alive = False
    timeline.kept_of = answer.pool, answer.model
    relay, body, length = Relay(http), answer.body, None if stream else len(answer.body)
    head = answer_head(http, 200, {"content-type": answer.content_type}, timeline, length, stream, won=0)
    relay.begin(head, body[:SLICE], length)
    for start in range(SLICE, len(body), SLICE):
        await http.writer.drain(STALL)
        relay.write(body[start : start + SLICE])
    relay.end()
    timeline.delivered(200, monotonic())
