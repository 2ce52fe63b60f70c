"""Prompts: what of a request body becomes tokens."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from backends.interface import Operation
from gateway.estimate.prompt import LOW_DETAIL_TOKENS, MEDIA_TOKENS, NOT_TEXT, Prompt, prompt_of


def chat(*messages: dict[str, Any], **more: Any) -> Prompt:
    return prompt_of(Operation.CHAT, {"model": "m", "messages": list(messages), **more})


def completion(prompt: Any) -> Prompt:
    return prompt_of(Operation.COMPLETION, {"model": "m", "prompt": prompt})


def image(url: str, **more: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url, **more}}]}


def ids(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def test_a_message_names_its_role_once() -> None:
    """Only the first piece of a message opens it."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat({"role": "user", "content": parts}) == Prompt((("user", "one"), (None, "two")), 1)


def test_a_message_without_text_still_counts_as_one() -> None:
    """Its template is rendered all the same."""
    assert chat({"role": "assistant", "content": None}) == Prompt((("assistant", ""),), 1)


def test_tools_come_before_the_messages() -> None:
    """Engines render tool definitions into the system prompt; they are not a message of their own."""
    prompt = chat({"role": "user", "content": "hi"}, tools=[{"type": "function", "function": {"name": "f"}}])
    assert prompt == Prompt(((None, '[{"type":"function","function":{"name":"f"}}]'), ("user", "hi")), 1)


def test_what_the_assistant_called_is_part_of_the_prompt() -> None:
    """Name and arguments are rendered; ids are not."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    prompt = chat({"role": "assistant", "tool_calls": [call]})
    assert prompt.pieces == (("assistant", '{"name": "f", "arguments": {"x":1}}'),)


def test_the_old_function_call_counts_as_a_tool_call() -> None:
    """Both spellings of the same thing are in use."""
    call = {"name": "f", "arguments": "{}"}
    new = chat({"role": "assistant", "tool_calls": [{"function": call}]})
    assert chat({"role": "assistant", "function_call": call}) == new


def test_an_image_counts_by_the_tile_rule() -> None:
    """85 tokens at low detail, otherwise what 1024 x 1024 pixels would."""
    (_, low), (_, high) = chat(image("http://a/b.png", detail="low"), image("http://a/b.png")).pieces
    assert (len(low) // 4, len(high) // 4) == (LOW_DETAIL_TOKENS, MEDIA_TOKENS)


def test_the_same_image_is_the_same_prefix_and_another_is_not() -> None:
    """An image in a prompt is part of what an engine's cache is keyed by."""
    data = "data:image/png;base64," + "A" * 50_000
    assert chat(image(data)) == chat(image(data))
    assert chat(image(data)) != chat(image(data[:-1] + "B"))


def test_media_never_collide_with_words() -> None:
    """Their ids are of no vocabulary."""
    ((_, span),) = chat(image("http://a")).pieces
    assert min(array("I", span)) >= NOT_TEXT  # type: ignore[arg-type]


def test_audio_is_not_tokenised_as_text() -> None:
    """A second of sound is not ten thousand letters of base64."""
    part = {"type": "input_audio", "input_audio": {"data": "UklGR" * 2000, "format": "wav"}}
    ((_, span),) = chat({"role": "user", "content": [part]}).pieces
    assert len(span) // 4 == MEDIA_TOKENS


def test_a_long_message_is_several_pieces() -> None:
    """So that its beginning can be recognised when its end changes."""
    text = "one two three " * 500
    pieces = chat({"role": "user", "content": text}).pieces
    assert len(pieces) > 1
    assert "".join(str(span) for _, span in pieces) == text
    assert [role for role, _ in pieces[1:]] == [None] * (len(pieces) - 1)


@pytest.mark.parametrize(
    ("prompt", "spans"),
    [
        ("text", ["text"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [ids(1, 2, 3)]),
        ([[1, 2], [3]], [ids(1, 2), ids(3)]),
        ([], []),
        (["text", [7]], ["text", ids(7)]),
    ],
)
def test_a_completion_prompt_may_be_text_or_ids_or_several(prompt: Any, spans: list[Any]) -> None:
    """Every form that the API takes is read, without roles or template."""
    assert completion(prompt) == Prompt(tuple((None, span) for span in spans), 0)


@pytest.mark.parametrize("token", [-1, 2**40, True])
def test_ids_that_no_vocabulary_has_are_left_to_the_engine(token: int) -> None:
    """The engine refuses them; counting them must not fail."""
    ((_, span),) = completion([token]).pieces
    assert len(span) // 4 == 1


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "assistant", "tool_calls": [{"function": "f"}]},
        {"role": "assistant", "function_call": "auto"},
        {"role": "tool", "content": "42", "tool_call_id": 7, "name": 8},
        {"role": "r" * 10_000, "content": ""},
    ],
)
def test_what_only_the_engine_can_refuse_is_still_counted(message: dict[str, Any]) -> None:
    """Ingress validates what decisions read; everything else must pass through here unharmed."""
    assert chat(message).messages == 1
