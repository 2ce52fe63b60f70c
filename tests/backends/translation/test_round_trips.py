"""Requests and answers, there and back: no field is lost, none invented."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings

from backends.translation.omissions import Omissions
from backends.translation.registry import CHAT_TO_MESSAGES, MESSAGES_TO_CHAT
from tests.support.dialect_strategies import Json, answers, arguments, chat_requests, message_requests


def spelled(value: Any) -> str:
    """JSON text: tells 1 from 1.0 and true, and the order of calls."""
    return json.dumps(value, sort_keys=True)


@settings(max_examples=100, deadline=None)
@given(chat_requests())
def test_a_chat_request_comes_back_from_messages(body: Json) -> None:
    there = CHAT_TO_MESSAGES.request(body, Omissions())
    assert spelled(MESSAGES_TO_CHAT.request(there, Omissions())) == spelled(body)


@settings(max_examples=100, deadline=None)
@given(message_requests())
def test_a_messages_request_comes_back_from_chat(body: Json) -> None:
    there = MESSAGES_TO_CHAT.request(body, Omissions())
    assert spelled(CHAT_TO_MESSAGES.request(there, Omissions())) == spelled(body)


@settings(max_examples=100, deadline=None)
@given(answers())
def test_an_answer_comes_back_from_chat(answer: Json) -> None:
    """`input_tokens` alone are no more than the gateway can know: a chat counts the whole prompt."""
    there = CHAT_TO_MESSAGES.reply(answer, {})
    assert there["object"] == "chat.completion"
    assert spelled(MESSAGES_TO_CHAT.reply(there, {})) == spelled(answer)


@settings(max_examples=100, deadline=None)
@given(message_requests())
def test_the_body_of_a_caller_is_left_as_it_is(body: Json) -> None:
    """Other attempts translate the same body again."""
    before = arguments(body)
    MESSAGES_TO_CHAT.request(body, Omissions())
    assert arguments(body) == before
