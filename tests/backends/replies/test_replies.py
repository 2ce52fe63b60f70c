"""Every known reply that is no answer has one meaning, and a cause without secrets."""

from __future__ import annotations

import re

import pytest

from backends.failures import NOT_SERVED
from backends.interface import FailureKind
from policies.blame.blame import BLAME, Fault
from tests.backends.replies.reply import PROMPT, SECRET, Reply, replies

REPLIES = replies()
PROVIDERS = (
    "openai azure anthropic gemini groq mistral xai deepseek openrouter together fireworks cohere vllm sglang llamacpp "
    "ollama tgi trtllm litellm nginx cloudflare"
)
# Kinds that no reply has: the connection or the gateway itself fails, or the gateway finds an operation missing.
SILENT = {
    *(FailureKind.CONNECT, FailureKind.UNRESOLVED, FailureKind.RESET),
    *(FailureKind.GATEWAY, FailureKind.UNSUPPORTED),
}
OF_ENGINES = {FailureKind.QUEUE_LIMIT}  # a rate limit of a server without accounts (tests/e2e/test_queue_limits.py)
OF_FORMS = {FailureKind.UNFIT}  # a refusal of what is known to have been sent (tests/e2e/test_lessons.py)
OF_KEYS = {FailureKind.CALLER_CREDENTIAL}  # a refused key, a rate or an account, where the key was the caller's own

every_reply = pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: f"{reply.provider}: {reply.name}")


@every_reply
def test_a_reply_has_its_kind_and_the_caller_its_status_and_code(reply: Reply) -> None:
    failure = reply.read()
    assert failure.kind is reply.kind
    assert (failure.status, failure.code) == reply.told
    assert failure.retry_after == pytest.approx(reply.learned)


@every_reply
def test_a_cause_tells_the_status_and_neither_a_key_nor_a_prompt(reply: Reply) -> None:
    """A cause goes into logs; so may the message of a refusal, but for the prompt, which its own caller may read."""
    failure = reply.read()
    status = "200 with an error inside" if reply.status == 200 else str(reply.status)
    assert failure.cause.startswith(status) or failure is NOT_SERVED
    assert len(failure.cause) <= 160
    assert "\n" not in failure.cause
    assert PROMPT not in failure.cause
    for text in (failure.cause, failure.message):
        assert not re.search(rf"{SECRET}|cdef\b|sk-|AIza|://|\borg[-_]\w{4}|16f2151a", text)
    if BLAME[failure.kind.value].fault in (Fault.REQUEST, Fault.OWN_CONTENT):
        assert failure.message not in failure.cause


def test_every_kind_has_a_row_in_the_table_of_blame_and_a_reply() -> None:
    """The table decides what follows; a kind without a reply would be a kind that nobody has seen."""
    assert {reply.kind.value for reply in REPLIES} <= set(BLAME)
    assert {reply.kind for reply in REPLIES} == set(FailureKind) - SILENT - OF_KEYS - OF_ENGINES - OF_FORMS


def test_all_providers_are_there() -> None:
    assert {reply.provider for reply in REPLIES} >= set(PROVIDERS.split())
    assert len(REPLIES) >= 130
    assert len({(reply.provider, reply.name) for reply in REPLIES}) == len(REPLIES)
