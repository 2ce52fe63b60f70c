from typing import Any

import msgspec

from lab.servers.request_parser import ChatBody, PromptEncoder, hash_blocks
from tests.support.engine_builders import encode


def chat(*messages: dict[str, Any], **more: Any) -> ChatBody:
    return msgspec.convert({"messages": list(messages), **more}, ChatBody)


USER = {"role": "user", "content": "one two three"}
ASSISTANT = {"role": "assistant", "content": "four five"}


def test_a_message_costs_its_text_and_four_tokens_and_the_answer_three():
    """The ChatML-like template, counted."""
    prompt = PromptEncoder(encode).prompt(chat(USER, ASSISTANT, USER))
    assert len(prompt.tokens) == (3 + 4) + (2 + 4) + (3 + 4) + 3


def test_the_prompt_of_the_next_turn_continues_this_one():
    """The prefix cache can hit the whole conversation."""
    encoder = PromptEncoder(encode)
    first, second = encoder.prompt(chat(USER)).tokens, encoder.prompt(chat(USER, ASSISTANT, USER)).tokens
    assert second[: len(first)] == first


def test_a_text_is_encoded_once():
    """The cost of a conversation grows with the new text."""
    seen: list[str] = []
    encoder = PromptEncoder(lambda text: seen.append(text) or encode(text))
    encoder.prompt(chat(USER))
    encoder.prompt(chat(USER, ASSISTANT, {"role": "user", "content": "six"}))
    assert seen == ["one two three", "four five", "six"]


def test_kept_encodings_are_bounded():
    """The least recently used text goes first."""
    seen: list[str] = []
    encoder = PromptEncoder(lambda text: seen.append(text) or [0] * 400_000)
    for text in ("a", "b", "a", "c", "a", "b"):
        encoder.text(text)
    assert seen == ["a", "b", "c", "b"]


def test_a_part_that_is_not_text_counts_as_256_tokens():
    """Images are told apart by their content."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = chat({"role": "user", "content": [{"type": "text", "text": "what is it"}, image]})
    assert len(PromptEncoder(encode).prompt(body).tokens) == 3 + 256 + 4 + 3


def test_a_continued_answer_has_the_seed_of_the_whole():
    """continue_final_message: the prompt ends with the given beginning, unclosed."""
    encoder = PromptEncoder(encode)
    whole, rest = encoder.prompt(chat(USER)), encoder.prompt(chat(USER, ASSISTANT, continue_final_message=True))
    assert (rest.seed, rest.begun, rest.tokens) == (whole.seed, "four five", whole.tokens + encode("four five"))


def test_block_hashes_are_chained_and_cover_full_blocks_only():
    """Equal up to the differing block, different from there on."""
    one, two = hash_blocks([1] * 40, 16), hash_blocks([1] * 16 + [2] * 24, 16)
    assert (len(one), one[0] == two[0], one[1] == two[1], hash_blocks([1] * 15, 16)) == (2, True, False, [])


def test_a_cache_salt_separates_all_hashes():
    """Two tenants never share a block."""
    assert set(hash_blocks([1] * 64, 16, "a")).isdisjoint(hash_blocks([1] * 64, 16, "b"))
