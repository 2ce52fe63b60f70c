"""Runs generated conversations through a gateway to every API of the field; counts what is refused, altered or lost."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.programs.field.caller_checks import check, read
from tests.programs.field.callers import Field, Reply, alone, field_of_apis, with_spare
from tests.programs.field.clients import Client
from tests.programs.field.dice import Dice, dice
from tests.programs.field.providers import Accounts, Exchange
from tests.programs.field.rules import Target, Violation, by_api, targets
from tests.programs.field.shapes import new_client

_EXAMPLE = 400  # characters
REFUSED = "refused"  # by the API, for what the gateway wrote or could have left out
TRANSLATED = "refused, translated"  # of these, in another dialect than the caller's
MENDED = "refused, then mended"  # asked again by the gateway, and answered
MEANS = "meaning"  # refused by the API for what cannot be left out
NAMED = "refused by name"  # for what the route lacks, by the gateway or the one API that is asked
HELD = "held back"  # by the gateway, though the API takes it
ANSWER = "answer"  # differs from what the model said
LOST = "state lost"  # its maker would have accepted it


@dataclass
class Results:
    """By API, class and kind. `translated`: of the refused, those in another dialect than the caller's. `examples`: the
    shortest of each. `broken`: conversations by API with a refusal. `lost`: requests by pool, form and kind of
    the refusal that the caller reads."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str, str], str] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    classes: Counter[tuple[str, str]] = field(default_factory=Counter)  # requests by API and class
    translated: Counter[tuple[str, str]] = field(default_factory=Counter)  # refused, by API and kind
    broken: set[tuple[int, str]] = field(default_factory=set)
    lost: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def note(self, api: str, form: str, kind: str, example: str) -> None:
        key = api, form, kind
        self.counts[key] += 1
        if len(example) < len(self.examples.get(key, example + " ")):
            self.examples[key] = example

    def total(self, form: str) -> int:
        return sum(count for (_, of, _), count in self.counts.items() if of == form)

    def add(self, other: Results) -> None:
        """The results of another share of the same run."""
        self.counts += other.counts
        self.requests += other.requests
        self.classes += other.classes
        self.translated += other.translated
        self.broken |= other.broken
        self.lost += other.lost
        self.examples = {**other.examples, **self.examples}


@dataclass
class Conversation:
    """A client and its accounts at the APIs that it meets."""

    seed: int
    client: Client
    random: Dice
    results: Results
    apis: Field
    route: Callable[[Target], str]
    caller: int = 0
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.accounts = Accounts(self.random)

    async def step(self, target: Target, number: int) -> bool:
        """False: there is no answer that the conversation could go on with."""
        self.client.proceed(number)
        self.results.requests[target.api] += 1
        reply = await self._send(target, lenient=False)
        refused = self.accounts.exchanges
        self._judge(target, refused, reply)
        if reply.status != 200 and refused:
            reply = await self._send(target, lenient=True)
        answered = [each for each in self.accounts.exchanges if each.turn is not None]
        if reply.status != 200 or not answered:
            await self._refused_by_name(target)
            return False
        if not refused or refused[-1] is not answered[-1]:
            self._lost(target, answered[-1:])
        return self._take(target, answered[-1], reply.data)

    async def _refused_by_name(self, target: Target) -> None:
        """The gateway's words where there is no other pool."""
        client = self.client
        route = alone(target)
        reply = await self.apis.send(route, client.operation, client.body(), client.headers, self.caller)
        if reply.status == 200:
            self._note(target, HELD, "from a route with several pools", "")
        else:
            self._note(target, NAMED, f"{reply.status} {_message(reply.data.decode('utf-8', 'replace'))}"[:120], "")

    async def _send(self, target: Target, *, lenient: bool) -> Reply:
        self.accounts.lenient, self.accounts.exchanges = lenient, []
        self.apis.providers.accounts = self.accounts
        client = self.client
        return await self.apis.send(self.route(target), client.operation, client.body(), client.headers, self.caller)

    def _judge(self, target: Target, exchanges: list[Exchange], reply: Reply) -> None:
        """Kinds of the refusal that the caller reads, and of those that were mended before."""
        failed = [each for each in exchanges if each.turn is None]
        if not failed:
            self._lost(target, exchanges[-1:])
            return
        means = all(violation.means for violation in failed[-1].violations)
        form = MENDED if reply.status == 200 else MEANS if means else REFUSED
        self.results.classes[target.api, form] += 1
        translated = form == REFUSED and failed[-1].dialect != self.client.operation.name.lower()
        if form == REFUSED:
            self.results.broken.add((self.seed, target.api))
            first = failed[-1].violations[0]
            if not first.means:
                self.results.lost[target.pool, form_of(first), first.kind] += 1
            self.results.classes[target.api, TRANSLATED] += translated
        for violation in {each.kind: each for each in reversed(failed[-1].violations)}.values():
            kind = MEANS if violation.means and form == REFUSED else form
            shown = f"{violation.message[:80]} | {_shown(failed[-1].body)}"
            self._note(target, kind, violation.kind, shown)
            self.results.translated[target.api, violation.kind] += translated and kind == REFUSED

    def _lost(self, target: Target, exchanges: list[Exchange]) -> None:
        for exchange in exchanges if self.client.returns_state else ():
            for _ in exchange.lost:
                self._note(target, LOST, f"{exchange.dialect} by {self.client.operation.name.lower()}", "")

    def _take(self, target: Target, exchange: Exchange, data: bytes) -> bool:
        client, turn = self.client, exchange.turn
        assert turn is not None
        dialect = client.operation.name.lower()
        try:
            answer = read(dialect, data, stream=client.stream)
            translated = dialect != exchange.dialect
            found = [*check(dialect, answer, turn, client.names, self.seen, translated=translated)]
        except Exception as error:
            self._note(
                target, ANSWER, f"{type(error).__name__}: {error}"[:90], data[:_EXAMPLE].decode("utf-8", "replace")
            )
            return False
        for kind in found:
            self._note(target, ANSWER, kind, json.dumps(answer, default=str)[:_EXAMPLE])
        answer.pop("end", None)
        client.take(answer)
        return True

    def _note(self, target: Target, form: str, kind: str, example: str) -> None:
        self.results.note(target.api, form, kind, f"{target.model} {self.client.shape} {example}")


def _shown(body: Any) -> str:
    return json.dumps(body, ensure_ascii=False)[:_EXAMPLE]


def _message(words: str) -> str:
    """The gateway's words, without places and names of pools."""
    with suppress(ValueError, KeyError, TypeError):
        words = str(json.loads(words)["error"]["message"])
    return re.sub(r"\[\d+\]", "[]", re.sub(r"No tier of this route can take the request: [^ ]+: ", "", words))


def form_of(violation: Violation) -> str:
    """What is refused: a member, a value, a role, or a form."""
    kind = violation.kind
    if kind.startswith(("member ", "messages.")) or " beside " in kind:
        return "member"
    if kind.startswith(("value ", "effort ", "number ", "length of stop", "thinking ")):
        return "value"
    return "role" if kind.startswith(("role ", "system ", "two system")) else "form"


async def run(
    seeds: range,
    *,
    steps: int = 4,
    apis: tuple[str, ...] = (),
    route: Callable[[Target], str] = with_spare,
    callers: int = 1,
    odd: bool = True,
) -> Results:
    """Every conversation against every API; a third of the steps is answered by any other. `callers`: take turns;
    `odd`: some send what few clients do."""
    results = Results()
    async with field_of_apis() as field_:
        for seed in seeds:
            for api, models in by_api().items():
                if apis and api not in apis:
                    continue
                random = dice(seed * 1009 + sum(map(ord, api)), odd=odd)
                conversation = Conversation(
                    seed, new_client(seed, odd=odd), random, results, field_, route, seed // 11 % callers
                )
                await _converse(conversation, models[seed % len(models)], steps, apis)
    return results


async def _converse(conversation: Conversation, own: Target, steps: int, apis: tuple[str, ...]) -> None:
    others = [target for target in targets() if not apis or target.api in apis]
    for step in range(steps):
        elsewhere = step < steps - 1 and conversation.random.random() < 0.3
        if not await conversation.step(conversation.random.choice(others) if elsewhere else own, step):
            return


async def sessions(seeds: range, steps: int, *, route: Callable[[Target], str] = with_spare) -> tuple[Results, int]:
    """Sessions that change the model at random steps; the steps that were neither answered nor refused by name."""
    results, unanswered = Results(), 0
    async with field_of_apis() as field_:
        for seed in seeds:
            random = dice(seed, odd=True)
            conversation = Conversation(seed, new_client(seed), random, results, field_, route)
            target = random.choice(targets())
            for step in range(steps):
                if random.random() < 0.2:
                    target = random.choice(targets())
                unanswered += not await conversation.step(target, step)
    return results, unanswered - results.total(NAMED)
