"""Inferred first tokens and ends: events for answers that no data plane shows, from histograms of engines."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from policies.fleet.engine_load import EngineLoad
from policies.fleet.fleet import Fleet
from policies.fleet.unseen_answers import AnswerStep, UnseenAnswer, UnseenAnswers


class InferredListener(Hashable, Protocol):
    """An answer, by which it is known to the fleet too."""

    def on_inferred_first_token(self, at: float) -> None: ...

    def on_inferred_end(self) -> None: ...


class InferredAnswers:
    """Reads the polls of a fleet. One of each fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._unseen = UnseenAnswers()
        self._listeners: dict[Hashable, InferredListener] = {}
        fleet.on_scraped = self._on_scraped

    def follow(self, answer: InferredListener, endpoint: str, now: float, *, ttft: float, shows_end: bool) -> bool:
        """Until `on_ended`. `ttft`: forecast, s. False: the engine reports no times, and nothing is inferred."""
        is_followed = self._unseen.on_sent(answer, endpoint, now, ttft=ttft, shows_end=shows_end)
        if is_followed:
            self._listeners[answer] = answer
        return is_followed

    def tokens(self, answer: InferredListener, now: float) -> int:
        return self._unseen.tokens(answer, now)

    def on_ended(self, answer: InferredListener, now: float) -> UnseenAnswer | None:
        """None: its first token was not noticed."""
        self._listeners.pop(answer, None)
        return self._unseen.on_ended(answer, now)

    def _on_scraped(self, endpoint: str, load: EngineLoad, now: float) -> None:
        for event in self._unseen.on_report(endpoint, load, now):
            if (listener := self._listeners.get(event.key)) is None:
                continue
            if event.step is AnswerStep.FIRST_TOKEN:
                listener.on_inferred_first_token(event.at)
            else:
                listener.on_inferred_end()
