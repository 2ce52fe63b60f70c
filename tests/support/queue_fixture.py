"""A QueueScheduler before a small fleet, in virtual time.

The engines behave exactly as the TTFT predictor has learned. The prefill of a prompt of PROMPT tokens takes 0.0986 s,
so an engine has room for a second prompt, and none for a third.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from policies.blame.blame import BLAME
from policies.fleet.fleet import AttemptReport, Fleet
from policies.queue import endpoint_queues
from policies.queue.queue_scheduler import QueueScheduler
from policies.queue.queued_request import Hold, QueuedRequest
from policies.queue_parts import queue_parts
from policies.routes.route import Route
from policies.routing.decide import decide
from policies.types import (
    AttemptOutcome,
    Candidate,
    Decision,
    Endpoint,
    Load,
    Pool,
    PoolEstimate,
    PrefixBlocks,
    Price,
    PromptEstimate,
    RequestView,
)

PROMPT = 1900  # tokens
START = 1000.0
LESSONS = 40  # pairs of first tokens, enough for a calibrated prediction

ONE, TWO = Endpoint("small/1", "small"), Endpoint("small/2", "small")
LARGE, API = Endpoint("large/1", "large"), Endpoint("api/1", "api")
PRICES = {"small": Price(1.0, 1.0), "large": Price(5.0, 5.0), "api": Price(20.0, 20.0)}


def pool(name: str, members: Sequence[Endpoint]) -> Pool:
    return Pool(name, name, tuple(members), local=name != "api", price=PRICES[name])


def route(budget: float | None = 1.0, **more: Any) -> Route:
    ttft = {"ttft": {"budget": f"{budget * 1e3:g}ms"}} if budget else {}
    return Route.model_validate({"name": "r", "tiers": ["small"], "on_miss": "queue", **ttft, **more})


@dataclass
class QueueFixture:
    """Requests, queues and engines under one clock. `released`: the decisions of released requests, in order."""

    endpoints: Sequence[Endpoint] = (ONE,)
    now: float = START
    released: dict[str, Decision] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)  # keys of completed requests
    lessons: int = LESSONS

    def __post_init__(self) -> None:
        members = {endpoint.pool: [e for e in self.endpoints if e.pool == endpoint.pool] for endpoint in self.endpoints}
        self.fleet = Fleet(pool(name, found) for name, found in members.items())
        self.scheduler = QueueScheduler(queue_parts())
        self._sequence = count()
        self._estimates: dict[str, PromptEstimate] = {}
        self._routes: dict[str, Route] = {}
        self._entered: dict[str, QueuedRequest] = {}
        for endpoint in self.endpoints:
            self._teach(endpoint)

    def _teach(self, endpoint: Endpoint) -> None:
        """Completes requests at the predicted TTFT: each prompt on the idle endpoint, and a second prompt behind the
        first."""
        for lesson in range(self.lessons):
            at = START - 200 + lesson
            tokens = {
                key: at + self.send(key, endpoint, 500 + 100 * lesson, at, stream=True) for key in ("first", "second")
            }
            for key, first_token in tokens.items():
                self.fleet.on_first_token(key, first_token)
                self.fleet.on_ended(key, AttemptOutcome.COMPLETED, first_token)

    def send(
        self,
        key: str,
        endpoint: Endpoint,
        tokens: int,
        at: float,
        pace: float | None = None,
        stream: bool = False,
        caller: str = "",
    ) -> float:
        """Sends to the endpoint, past the queue; returns the predicted TTFT (s). Only a streamed attempt trains the
        predictor."""
        load = self.fleet.snapshot(at).loads[endpoint.id]
        forecast = self.fleet.view.forecast(endpoint, load, tokens, 0, at)
        candidate = Candidate(endpoint, 0, tokens, 0, forecast, 1.0, 0.0)
        self.fleet.on_sent(key, candidate, PoolEstimate(tokens), at, stream, pace, caller=caller)
        return forecast.point_estimate

    def enter(
        self, request_key: str, tokens: int = PROMPT, budget: float | None = 1.0, tenant: str = "", **more: Any
    ) -> list[str]:
        """Enters a request and releases; returns the keys of all requests released."""
        self.arrive(request_key, tokens, budget, tenant, **more)
        return self.release()

    def arrive(
        self,
        request_key: str,
        tokens: int = PROMPT,
        budget: float | None = 1.0,
        tenant: str = "",
        pinned: str = "",
        blocks: tuple[int, ...] = (),
        caller: str = "",
        asked_tpot: float | None = None,
        **more: Any,
    ) -> None:
        request = RequestView(self.now, stream=True, pinned=pinned, caller=caller, tpot_budget=asked_tpot)
        prompt = PoolEstimate(tokens, PrefixBlocks(blocks))
        pools = {endpoint.pool: prompt for endpoint in self.endpoints}
        self._estimates[request_key] = PromptEstimate(pools)
        estimate, promised = self._estimates[request_key], route(budget, **more)
        self._routes[request_key] = promised
        queued = QueuedRequest(request_key, request, estimate, promised, next(self._sequence), tenant)
        self._entered[request_key] = queued
        self.scheduler.enter(queued)

    def release(self, later: float = 0.0) -> list[str]:
        """Advances the clock by `later` seconds; returns released keys. Each request is dispatched before the next is
        released."""
        self.now += later
        return list(self._dispatch_released())

    def _dispatch_released(self) -> Iterator[str]:
        for name, decision in self.scheduler.release(self.fleet, self.now):
            assert isinstance(name, str)
            assert name not in self.released
            self.released[name] = decision
            if (chosen := decision.chosen) is not None:
                prompt = self._estimates[name].pools[chosen.endpoint.pool]
                self.fleet.on_sent(name, chosen, prompt, self.now, False, route=self._routes[name])
                self.scheduler.on_dispatched(name)
            yield name

    def held(self, name: str) -> QueuedRequest:
        return next(queued for queued in self.scheduler.holds() if queued.request_key == name)

    def would_place(self, tokens: int = PROMPT, budget: float | None = 1.0) -> tuple[Decision, Hold | None]:
        """The decision of a new request that is not entered, and the rule that would hold it."""
        pools = {endpoint.pool: PoolEstimate(tokens) for endpoint in self.endpoints}
        request = RequestView(self.now, stream=True)
        queued = QueuedRequest("asked", request, PromptEstimate(pools), route(budget), next(self._sequence))
        return self.scheduler.would_place(queued, self.fleet, self.now)

    def would_hold(self, tokens: int = PROMPT, budget: float | None = 1.0) -> Hold | None:
        """The rule that would hold such a request."""
        return self.would_place(tokens, budget)[1]

    def hold(self, name: str) -> str:
        """The rule that holds a request."""
        hold = self.held(name).hold
        return "" if hold is None else hold.rule

    def held_s(self, name: str) -> dict[str, float]:
        """Seconds for which each rule has held a request that has left."""
        return self._entered[name].held_s

    def leave(self, name: str) -> dict[str, float]:
        """The caller is gone; seconds for which each rule had held the request."""
        self.scheduler.leave(name, self.now)
        return self.held_s(name)

    def chance(self, name: str) -> float:
        """The chance of the deadline at the latest decision."""
        return self.scheduler._round(self.fleet, self.now).view.decide(self.held(name)).ranked[0].probability

    def destination(self, name: str) -> str:
        """The id of the chosen endpoint; empty for a refusal."""
        chosen = self.released[name].chosen
        return chosen.endpoint.id if chosen else ""

    def first_tokens(self, *names: str) -> None:
        for name in names:
            self.fleet.on_first_token(name, self.now)

    def complete(self, name: str) -> None:
        """Completes the request after the engine's predicted prefill time."""
        self.now += self.prefill_seconds([name])
        self.first_tokens(name)
        self.fleet.on_ended(name, AttemptOutcome.COMPLETED, self.now)
        self.done.add(name)

    def fail(self, kind: str, caller: str = "", times: int = 1) -> None:
        """Small prompts of the caller fail at ONE."""
        for key in map(str, range(times)):
            self.send(key, ONE, 100, self.now, caller=caller)
            blame = BLAME[kind]
            self.fleet.on_ended(key, blame.outcome, self.now, AttemptReport(blame=blame, retry_after=30.0))

    def prefill_seconds(self, names: Iterable[str]) -> float:
        """Predicted engine time of these requests."""
        return sum(self.released[name].ranked[0].forecast.prefill for name in names)

    def assigned(self, endpoint: Endpoint = ONE) -> list[str]:
        return _names(self.scheduler.queues.of(endpoint.id))

    @property
    def best_effort(self) -> list[str]:
        return _names(self.scheduler.queues.best_effort)

    def load(self, endpoint: Endpoint = ONE) -> Load:
        return self.fleet.snapshot(self.now).loads[endpoint.id]

    def fill(self, *endpoints: Endpoint) -> list[str]:
        """Sends prompts until the endpoints have no room; returns the request keys."""
        keys = [f"{endpoint.id} {place}" for endpoint in endpoints for place in ("a", "b")]
        for key in keys:
            self.send(key, Endpoint(key.split()[0], key.partition("/")[0]), PROMPT, self.now)
        return keys

    def decode(
        self, endpoint: Endpoint = ONE, token: float = 0.1, pace: float = 0.05, since: float = 10.0, answers: int = 1
    ) -> list[str]:
        """Puts `answers` streams in progress on the endpoint for `since` seconds, at `token` s per token; returns the
        keys."""
        keys = [f"{endpoint.id} answer {number}" for number in range(answers)]
        for key in keys:
            self.send(key, endpoint, 100, self.now - since, pace)
            self.fleet.on_first_token(key, self.now - since)
        self.fleet.on_progress([(key, round(since / token)) for key in keys], self.now)
        return keys

    def end(self, *keys: str) -> None:
        for key in keys:
            self.fleet.on_ended(key, AttemptOutcome.COMPLETED, self.now)


def _names(queue: Iterable[QueuedRequest]) -> list[str]:
    return [str(queued.request_key) for queued in queue]


def count_decisions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the requests that are decided from now on, one for each decision."""
    decided: list[str] = []

    def counted(queued: QueuedRequest, *known: Any) -> Decision:
        decided.append(str(queued.request_key))
        return decide(queued, *known)

    monkeypatch.setattr(endpoint_queues, "decide", counted)
    return decided


def bound_decisions(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """An error, not an endless loop, from the decision after `most` on."""
    left = iter(range(most))

    def bounded(*known: Any) -> Decision:
        assert next(left, None) is not None, "the queue decides again and again"
        return decide(*known)

    monkeypatch.setattr(endpoint_queues, "decide", bounded)
