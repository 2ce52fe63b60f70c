"""Prompts: the parts of a request body which become tokens."""

from __future__ import annotations

from array import array
from base64 import b64encode
from typing import Any

import pytest
from msgspec import Raw

from backends.interface import Operation
from gateway.strict_json import encode
from gateway.tokenize.media import NOT_TEXT, family_of
from gateway.tokenize.prompt import MEDIA_TOKENS, TEXT_EFFORT, Piece, Prompt, prompt_of


def chat(*messages: Any, **more: Any) -> Prompt:
    return prompt_of(Operation.CHAT, {"model": "m", "messages": list(messages), **more})


def completion(prompt: Any) -> Prompt:
    return prompt_of(Operation.COMPLETION, {"model": "m", "prompt": prompt})


def pieces(prompt: Prompt) -> list[Piece]:
    return [piece for part in range(len(prompt.digests)) for piece in prompt.pieces(part)]


def image(url: str, **more: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url, **more}}]}


def ids(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def test_a_message_names_its_role_once() -> None:
    """Only the first piece of a message opens it."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert pieces(chat({"role": "user", "content": parts})) == [Piece("user", "one"), Piece(None, "two")]


def test_a_message_without_text_still_counts_as_one() -> None:
    """The template is rendered all the same."""
    prompt = chat({"role": "assistant", "content": None})
    assert (prompt.messages, pieces(prompt)) == (1, [Piece("assistant", "")])


def test_tools_come_before_the_messages() -> None:
    """Engines render tool definitions into the system prompt, not as a message."""
    prompt = chat({"role": "user", "content": "hi"}, tools=[{"type": "function", "function": {"name": "f"}}])
    assert prompt.messages == 1
    assert pieces(prompt) == [
        Piece(None, '[{"type":"function","function":{"name":"f"}}]'),
        Piece("user", "hi"),
    ]


def test_tool_calls_of_the_assistant_are_part_of_the_prompt() -> None:
    """Name and arguments are rendered; ids are not."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    prompt = chat({"role": "assistant", "tool_calls": [call]})
    assert pieces(prompt) == [Piece("assistant", '{"name": "f", "arguments": {"x":1}}')]


def test_the_old_function_call_counts_as_a_tool_call() -> None:
    """Both spellings of the same thing are in use."""
    call = {"name": "f", "arguments": "{}"}
    new = chat({"role": "assistant", "tool_calls": [{"function": call}]})
    assert pieces(chat({"role": "assistant", "function_call": call})) == pieces(new)


def test_an_image_counts_by_the_tile_rule() -> None:
    """85 tokens at low detail, otherwise as 1024 x 1024 pixels."""
    low, high = pieces(chat(image("http://a/b.png", detail="low"), image("http://a/b.png")))
    assert (len(low.span) // 4, len(high.span) // 4) == (85, 765)


def test_the_same_image_is_the_same_prefix_and_another_is_not() -> None:
    """An image is part of the key of an engine's prefix cache."""
    data = "data:image/png;base64," + "A" * 50_000
    assert pieces(chat(image(data))) == pieces(chat(image(data)))
    assert pieces(chat(image(data))) != pieces(chat(image(data[:-1] + "B")))


def test_media_never_collide_with_words() -> None:
    """Ids of media belong to no vocabulary."""
    (piece,) = pieces(chat(image("http://a")))
    assert isinstance(piece.span, bytes)
    assert min(array("I", piece.span)) >= NOT_TEXT


def test_audio_is_not_tokenised_as_text() -> None:
    """A second of sound is not ten thousand letters of base64."""
    part = {"type": "input_audio", "input_audio": {"data": "UklGR" * 2000, "format": "wav"}}
    (piece,) = pieces(chat({"role": "user", "content": [part]}))
    assert len(piece.span) // 4 < 10


def test_the_tokens_of_media_are_bounded_for_a_prompt() -> None:
    """Headers that lie about a picture's size cannot fill the memory; pictures beyond the bound still differ."""
    lying = b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (60_000).to_bytes(4) * 2).decode()
    prompt = chat(*(image(f"data:image/png;base64,{lying}#{number}") for number in range(200)))
    gemini = family_of("gemini-2.5-pro")
    spans = [piece.span for part in range(200) for piece in prompt.pieces(part, gemini)]
    assert sum(map(len, spans)) // 4 <= MEDIA_TOKENS + 200
    assert len(set(spans[-50:])) == 50


def test_a_long_message_is_several_pieces() -> None:
    """The beginning can be recognised when the end changes."""
    text = "one two three " * 500
    found = pieces(chat({"role": "user", "content": text}))
    assert len(found) > 1
    assert "".join(str(piece.span) for piece in found) == text
    assert [piece.role for piece in found[1:]] == [None] * (len(found) - 1)


@pytest.mark.parametrize(
    ("prompt", "spans"),
    [
        ("text", ["text"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [ids(1, 2, 3)]),
        ([[1, 2], [3]], [ids(1, 2), ids(3)]),
        ([], [b""]),
        (["text", [7]], ["text", ids(7)]),
    ],
)
def test_a_completion_prompt_may_be_text_or_ids_or_several(prompt: Any, spans: list[Any]) -> None:
    """Every form of the API is read, without roles or template."""
    found = completion(prompt)
    assert (found.messages, pieces(found)) == (0, [Piece(None, span) for span in spans])


@pytest.mark.parametrize("token", [-1, 2**40, True])
def test_ids_that_no_vocabulary_has_are_left_to_the_engine(token: int) -> None:
    """The engine refuses such ids; counting must not fail."""
    (piece,) = pieces(completion([token]))
    assert len(piece.span) // 4 == 1


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
def test_content_that_only_an_engine_can_refuse_is_counted(message: dict[str, Any]) -> None:
    """Parsing validates the fields needed for decisions; everything else must pass through here unharmed."""
    assert pieces(chat(message))


# --------------------------------------------------------------------------- parts

SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def test_a_part_is_named_by_its_text_alone() -> None:
    """The next turn of a conversation begins with the same parts."""
    before, after = chat(*SAID[:1], tools=[{}]), chat(*SAID, tools=[{}])
    assert after.digests[: len(before.digests)] == before.digests
    assert len(set(after.digests)) == len(after.digests) == 3


def test_digests_of_decoded_and_raw_values_are_equal() -> None:
    """Values, and JSON left as written."""
    written = [Raw(encode(message)) for message in SAID]
    assert chat(*written).digests == chat(*SAID).digests
    assert pieces(chat(*written)) == pieces(chat(*SAID))


def test_parts_that_are_spelled_alike_but_stand_elsewhere_have_other_names() -> None:
    """A text is not the list with the same spelling, nor a definition the message."""
    assert completion("[1]").digests != completion([1]).digests
    assert chat(SAID[0], functions=SAID[0]).digests[0] != chat(SAID[0]).digests[0]
    assert chat(SAID[0], functions=[1]).digests[0] != completion([1]).digests[0]


def test_tool_definitions_are_normalised() -> None:
    """White space between members is not the engine's."""
    spaced, dense = ([Raw(text)] for text in (b'{"a" : [1, 2] }', b'{"a":[1,2]}'))
    assert pieces(chat(SAID[0], tools=spaced)) == pieces(chat(SAID[0], tools=dense))


def test_a_prompt_can_drop_its_decoded_messages() -> None:
    """A prompt lives as long as its request, which holds the text already."""
    prompt = prompt_of(Operation.CHAT, {"messages": [Raw(encode(message)) for message in SAID]})
    before = pieces(prompt)
    prompt.decoded = {}
    assert pieces(prompt) == before


def test_messages_that_were_decoded_are_not_decoded_again() -> None:
    """Parsing decodes a new message once."""
    prompt = Prompt([Raw(b"{"), Raw(b"{")], [1, 2], 2, 2, dict(enumerate(SAID)))
    assert pieces(prompt) == [Piece("user", "hi"), Piece("assistant", "ho")]


def test_the_effort_of_an_estimate_is_that_of_the_rest() -> None:
    """Bytes from a part on, and for each part as much as a short text takes."""
    written = [Raw(encode(message)) for message in SAID]
    prompt = chat(*written)
    assert prompt.effort == prompt.size + 2 * TEXT_EFFORT
    assert [prompt.effort_from(part) for part in (0, 1, 2)] == [prompt.effort, len(encode(SAID[1])) + TEXT_EFFORT, 0]
    assert chat(*SAID).effort_from(1) == chat(*SAID).effort == prompt.effort


@pytest.mark.parametrize(
    ("prompt", "size", "texts"),
    [("word", 4, 1), (["word" * 1000], 4004, 1), (["a", "b", "c"], 13, 3), ([1, 2, 3], 7, 1), ([[1, 2], [3]], 11, 2)],
)
def test_a_list_of_prompts_is_as_large_as_its_texts(prompt: Any, size: int, texts: int) -> None:
    """The number of its elements says nothing of the time that they take."""
    found = completion(prompt)
    assert (found.size, found.effort) == (size, size + TEXT_EFFORT * texts)
