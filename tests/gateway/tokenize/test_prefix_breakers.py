"""Text of clients that changes with every request is left out of prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.interface import Operation
from gateway.api.inference_request import InferenceRequest, parse
from gateway.strict_json import decode, encode
from gateway.tokenize.prefix_breakers import IN_BODY, without_breakers
from tests.support.builders import backend

LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"
RULES = {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}
HELLO = {"role": "user", "content": "hello"}


def block(cch: str) -> dict[str, Any]:
    return {"type": "text", "text": LINE.format(cch)}


def stripped(operation: Operation, **body: Any) -> Any:
    return decode(without_breakers(operation, json.dumps(body).encode()))


def parsed(operation: Operation, **body: Any) -> InferenceRequest:
    return parse(operation, json.dumps({"model": "m", **body}).encode(), {}, 0.0, "req-1")


@pytest.mark.parametrize(
    ("operation", "body", "kept"),
    [
        (Operation.MESSAGES, {"system": [block("1"), RULES]}, {"system": [RULES]}),
        (Operation.MESSAGES, {"system": LINE.format(1) + "\nYou are."}, {"system": "You are."}),
        (Operation.MESSAGES, {"system": [block("1")]}, {}),
        (Operation.COUNT_TOKENS, {"system": [block("1"), RULES]}, {"system": [RULES]}),
        (
            Operation.MESSAGES,
            {"messages": [HELLO, {"role": "system", "content": [block("1"), RULES]}]},
            {"messages": [HELLO, {"role": "system", "content": [RULES]}]},
        ),
        (
            Operation.CHAT,
            {"messages": [{"role": "system", "content": LINE.format(1) + "\nYou are."}, HELLO]},
            {"messages": [{"role": "system", "content": "You are."}, HELLO]},
        ),
        (
            Operation.CHAT,
            {"messages": [{"role": "system", "content": [{"type": "text", "text": LINE.format(1) + "\nYou"}]}]},
            {"messages": [{"role": "system", "content": [{"type": "text", "text": "You"}]}]},
        ),
        (
            Operation.CHAT,
            {"messages": [{"role": "developer", "content": LINE.format(1)}, HELLO]},
            {"messages": [{"role": "developer", "content": ""}, HELLO]},
        ),
        (Operation.RESPONSES, {"instructions": LINE.format(1) + "\nYou are."}, {"instructions": "You are."}),
    ],
)
def test_the_line_is_removed_from_the_head_of_system_text(
    operation: Operation, body: dict[str, Any], kept: dict[str, Any]
) -> None:
    """As vLLM 0.32 does; a part without any other text goes too."""
    assert stripped(operation, model="m", **body) == {"model": "m", **kept}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": LINE.format(1)}]},
        {"messages": [{"role": "system", "content": "About " + LINE.format(1)}]},
        {"messages": [{"role": "assistant", "content": [block("1")]}]},
        {"messages": "x-anthropic-billing-header", "system": {"x-anthropic-billing-header": 1}},
        {"metadata": {"x-anthropic-billing-header": "1"}},
    ],
)
def test_other_text_is_left_alone(body: dict[str, Any]) -> None:
    """A caller may talk about the line."""
    raw = json.dumps(body).encode()
    assert without_breakers(Operation.CHAT, raw) is raw


@given(st.binary(max_size=60), st.integers(0, 200))
def test_no_body_breaks_the_removal(junk: bytes, at: int) -> None:
    """What cannot be read is left to the parser."""
    whole = json.dumps({"messages": [{"role": "system", "content": LINE.format(1)}, HELLO]}).encode()
    for raw in (junk + IN_BODY, whole[:at] + junk + whole[at:]):
        assert without_breakers(Operation.CHAT, raw)


def test_a_changing_head_does_not_change_the_prompt() -> None:
    """The parts have equal digests, so known turns are not read again."""
    first, second = (
        parsed(Operation.CHAT, messages=[{"role": "system", "content": [block(cch), RULES]}, HELLO])
        for cch in ("36ee5", "0aaa9")
    )
    assert first.prompt.digests == second.prompt.digests
    assert encode(first.body) == encode(second.body)


def test_a_server_that_reads_the_line_gets_it() -> None:
    """Anthropic's own API; no other."""
    request = parsed(Operation.CHAT, messages=[{"role": "system", "content": [block("36ee5"), RULES]}, HELLO])
    engine, reader = backend("vllm"), backend("vllm")
    reader.reads_attribution = True
    assert b"36ee5" not in encode(request.sent_to(engine))
    assert b"36ee5" in encode(request.sent_to(reader))
    plain = parsed(Operation.CHAT, messages=[HELLO])
    assert plain.sent_to(reader) is plain.body
