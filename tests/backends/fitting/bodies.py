"""Bodies made to fit, by the shipped facts."""

from __future__ import annotations

from typing import Any

from backends.facts.model_facts import Facts
from backends.fitting.fit import Fitted, fit, plan
from backends.fitting.target import Author
from backends.interface import Operation
from backends.translation.omissions import Omissions

Json = dict[str, Any]

CHAT, MESSAGES, RESPONSES = Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES
ASKED: Json = {"role": "user", "content": "hi"}
FUNCTION: Json = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def whole(facts: Facts, operation: Operation, members: Json, author: Author, told: Omissions) -> Fitted:
    prompt = {"input": "hi"} if operation is RESPONSES else {"messages": [ASKED]}
    return fit({**prompt, **members}, plan(operation, facts, author), told)


def fitted(
    facts: Facts, operation: Operation, members: Json, author: Author = Author.GATEWAY
) -> tuple[Json, list[str]]:
    """The members sent, without the prompt that stands for any, and what is told."""
    told = Omissions()
    body = dict(whole(facts, operation, members, author, told).body)
    for name in {"messages", "input"} - members.keys():
        body.pop(name, None)
    return body, sorted(told.noted)
