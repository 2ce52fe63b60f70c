"""All translations, and translation chains from a caller's operation to an operation of the backend."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from backends.interface import Operation
from backends.translation.chat_to_messages.answer import ChatFromMessagesStream, chat_from_message
from backends.translation.chat_to_messages.request import chat_to_messages
from backends.translation.chat_to_responses.answer import ChatFromResponsesStream, chat_from_response
from backends.translation.chat_to_responses.request import chat_to_responses
from backends.translation.messages_to_chat.answer import MessagesFromChatStream, message_from_chat
from backends.translation.messages_to_chat.request import messages_to_chat
from backends.translation.omissions import NoRefusals
from backends.translation.responses_to_chat.answer import ResponsesFromChatStream, response_from_chat
from backends.translation.responses_to_chat.request import responses_to_chat
from backends.translation.translation import Json, Translation

_CHAT, _MESSAGES, _RESPONSES = Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES

CHAT_TO_RESPONSES = Translation(_CHAT, _RESPONSES, chat_to_responses, chat_from_response, ChatFromResponsesStream)
CHAT_TO_MESSAGES = Translation(_CHAT, _MESSAGES, chat_to_messages, chat_from_message, ChatFromMessagesStream)
RESPONSES_TO_CHAT = Translation(_RESPONSES, _CHAT, responses_to_chat, response_from_chat, ResponsesFromChatStream)
MESSAGES_TO_CHAT = Translation(_MESSAGES, _CHAT, messages_to_chat, message_from_chat, MessagesFromChatStream)
TRANSLATIONS = (CHAT_TO_RESPONSES, CHAT_TO_MESSAGES, RESPONSES_TO_CHAT, MESSAGES_TO_CHAT)


@lru_cache(256)
def chain(operation: Operation, native: frozenset[Operation]) -> tuple[Translation, ...] | None:
    """Return the shortest chain of translations into a native operation; None: there is none."""
    reached: dict[Operation, tuple[Translation, ...]] = {operation: ()}
    frontier = [operation]
    while frontier:
        for each in frontier:
            if each in native:
                return reached[each]
        frontier = _next(frontier, reached)
    return None


def _next(frontier: Collection[Operation], reached: dict[Operation, tuple[Translation, ...]]) -> list[Operation]:
    """Note the operations one translation further on."""
    found = []
    for translation in TRANSLATIONS:
        if translation.caller in frontier and translation.backend not in reached:
            reached[translation.backend] = (*reached[translation.caller], translation)
            found.append(translation.backend)
    return found


_CHAT_ALONE = frozenset({Operation.CHAT})


def as_chat(operation: Operation, body: Mapping[str, Any]) -> Json:
    """The messages and tools of a body as a chat's, without all that has no equivalent: to count and hash a prompt."""
    steps = chain(operation, _CHAT_ALONE)
    if steps is None:
        raise LookupError(operation)
    chat, dropped = dict(body), NoRefusals()
    for translation in steps:
        chat = translation.request(chat, dropped)
    return chat
