"""All translations, and the chain of translations from a caller's operation to one that a backend speaks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from backends.interface import Operation
from backends.translation.chat_over_messages import CHAT_OVER_MESSAGES
from backends.translation.chat_over_responses import CHAT_OVER_RESPONSES
from backends.translation.messages_over_chat import MESSAGES_OVER_CHAT
from backends.translation.responses_over_chat import RESPONSES_OVER_CHAT
from backends.translation.translation import Json, Translation

TRANSLATIONS: tuple[Translation, ...] = (
    CHAT_OVER_RESPONSES,
    CHAT_OVER_MESSAGES,
    RESPONSES_OVER_CHAT,
    MESSAGES_OVER_CHAT,
)


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


class _Everything(frozenset[str]):
    def __contains__(self, member: object) -> bool:
        return True


_EVERYTHING = _Everything()
_CHAT = frozenset({Operation.CHAT})


def as_chat(operation: Operation, body: Mapping[str, Any]) -> Json:
    """The messages and tools of a body as a chat's, without all that has no equivalent: to count and hash a prompt."""
    steps = chain(operation, _CHAT)
    if steps is None:
        raise LookupError(operation)
    chat = dict(body)
    for translation in steps:
        chat = translation.request(chat, _EVERYTHING)
    return chat
