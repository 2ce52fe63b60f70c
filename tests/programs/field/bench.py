"""Runs generated conversations against every API of the field, and counts what is refused, altered or lost."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.programs.field.caller_checks import check, read
from tests.programs.field.clients import Client, new_client
from tests.programs.field.fakes import Fake
from tests.programs.field.pipeline import Pipeline, Sent, Unfit
from tests.programs.field.rules import Target, by_api, targets
from tests.programs.field.state import Ledger

_EXAMPLE = 400  # characters
REFUSED, NAMED, ANSWER, LOST, MEANS = "refused", "refused by name", "answer", "state lost", "meaning"


@dataclass
class Results:
    """By API, class and kind. `examples`: the first body of each."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str, str], str] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # requests with a violation that is none of meaning
    broken: set[tuple[int, str]] = field(default_factory=set)  # conversations by API with such a request

    def note(self, api: str, form: str, kind: str, example: str) -> None:
        key = api, form, kind
        self.counts[key] += 1
        if len(example) < len(self.examples.get(key, example + " ")):
            self.examples[key] = example


@dataclass
class Conversation:
    """A client and the fakes that it meets: of each API one account, with its ledger."""

    seed: int
    client: Client
    random: Random
    results: Results
    pipeline: Pipeline
    fakes: dict[str, Fake] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def fake(self, target: Target) -> Fake:
        if target.name not in self.fakes:
            self.fakes[target.name] = Fake(target, self.random, Ledger())
        return self.fakes[target.name]

    def step(self, target: Target, number: int) -> bool:
        """False: the conversation cannot go on."""
        client, fake = self.client, self.fake(target)
        client.proceed(number)
        self.results.requests[target.api] += 1
        sent = self.pipeline.send(target, client.operation, client.body(), client.headers)
        if isinstance(sent, Unfit):
            self.results.note(target.api, NAMED, sent.reason[:90], _shown(client.body()))
            return False
        self._judge(target, fake, sent)
        turn = fake.turn(sent.dialect, sent.body)
        raw = fake.write(sent.dialect, sent.body, turn, stream=sent.stream)
        dialect = client.operation.name.lower()
        try:
            answer = read(dialect, sent.back(raw), stream=client.stream)
            found = [*check(dialect, answer, turn, client.names, self.seen)]
        except Exception as error:
            self.results.note(
                target.api, ANSWER, f"{type(error).__name__}: {error}"[:90], raw[:_EXAMPLE].decode("utf-8", "replace")
            )
            return False
        for kind in found:
            self.results.note(target.api, ANSWER, kind, json.dumps(answer, default=str)[:_EXAMPLE])
        answer.pop("end", None)
        client.take(answer)
        return True

    def _judge(self, target: Target, fake: Fake, sent: Sent) -> None:
        found = fake.verify(sent.dialect, sent.body)
        for violation in found:
            form = MEANS if violation.means else REFUSED
            self.results.note(
                target.api,
                form,
                violation.kind,
                f"{target.model} {self.client.shape} {violation.message[:80]} | {_shown(sent.body)}",
            )
        if any(not violation.means for violation in found):
            self.results.refused[target.api] += 1
            self.results.broken.add((self.seed, target.api))
        if self.client.returns_state:
            for _ in fake.ledger.lost(sent.dialect, sent.body):
                self.results.note(
                    target.api,
                    LOST,
                    f"{sent.dialect} by {self.client.operation.name.lower()}",
                    f"{target.model} {self.client.shape}",
                )


def _shown(body: Any) -> str:
    return json.dumps(body, ensure_ascii=False)[:_EXAMPLE]


def run(conversations: int, *, steps: int = 4, seed: int = 0, apis: tuple[str, ...] = ()) -> Results:
    """Every conversation against every API; a third of the steps is answered by any other."""
    results, pipeline = Results(), Pipeline()
    for number in range(seed, seed + conversations):
        for api, models in by_api().items():
            if apis and api not in apis:
                continue
            random = Random(number * 1009 + sum(map(ord, api)))
            conversation = Conversation(number, new_client(number), random, results, pipeline)
            own = models[number % len(models)]
            for step in range(steps):
                elsewhere = step < steps - 1 and random.random() < 0.3
                if not conversation.step(random.choice(targets()) if elsewhere else own, step):
                    break
    return results


def sessions(number: int, steps: int) -> tuple[Results, int]:
    """Sessions that change the model at random steps; the steps that were not answered."""
    results, pipeline, unanswered = Results(), Pipeline(), 0
    for seed in range(number):
        random = Random(seed)
        conversation = Conversation(seed, new_client(seed), random, results, pipeline)
        target = random.choice(targets())
        for step in range(steps):
            if random.random() < 0.2:
                target = random.choice(targets())
            unanswered += not conversation.step(target, step)
    return results, unanswered
