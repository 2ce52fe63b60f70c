"""Conversations, documents and questions, several at a time, without idle clients."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from tests.programs.vllm.traffic import Answer, Asked, Messages, ask, client, text, user

BLOCK = 32  # tokens, of the servers
CONCURRENT = 8


@dataclass
class Talk:
    """Requests in sequence."""

    kind: str
    name: str
    group: str  # conversations with a common system prompt
    turns: int
    asked: int = 0
    messages: Messages = field(default_factory=list)

    def next(self) -> Asked:
        self.asked += 1
        turn = f"{self.name}-{self.asked}"
        if self.kind == "turn":
            system = {"role": "system", "content": text(1000, self.group)}
            self.messages = [*(self.messages or [system]), user(text(80, turn))]
            return Asked("turn", self.name, self.messages, 24, repeats=self.asked > 1)
        body = text(4500 if self.kind == "long" else 20 + 7 * int(self.name.rpartition("-")[2]), self.name)
        return Asked(self.kind, self.name, [user(f"{body}\n\n{text(30, turn)}")], 8, repeats=self.asked > 1)

    def answered(self, answer: Answer) -> bool:
        """Adds the answer; True if questions are left."""
        self.messages = [*self.messages, {"role": "assistant", "content": answer.text}]
        return self.asked < self.turns


async def run_talks(base_url: str, route: str, talks: list[Talk], rng: random.Random) -> list[Answer]:
    """Answers of all talks; an idle client takes a random waiting talk."""
    waiting, answers, unfinished = list(talks), list[Answer](), len(talks)

    async def ask_on() -> None:
        nonlocal unfinished
        while unfinished:
            if not waiting:
                await asyncio.sleep(0.02)
                continue
            talk = waiting.pop(rng.randrange(len(waiting)))
            answer = await ask(sdk, route, talk.next())
            answers.append(answer)
            if talk.answered(answer):
                waiting.append(talk)
            else:
                unfinished -= 1

    async with client(base_url) as sdk:
        await asyncio.gather(*(ask_on() for _ in range(CONCURRENT)))
    return answers


def share(truths: list[bool]) -> float:
    return 100 * sum(truths) / len(truths)
