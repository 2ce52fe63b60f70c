"""The estimator: tokens and prefix blocks of a prompt, at the cost of its new text."""

from __future__ import annotations

import inspect
import json
import textwrap
from array import array
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.interface import Operation
from gateway.api.inference_request import parse
from gateway.tokenize.estimator import Estimator
from gateway.tokenize.prompt import TEXT_EFFORT, Prompt, prompt_of
from gateway.tokenize.prompt_reader import BLOCK_BYTES, SHORT, PromptText, TokenizerConfig
from gateway.tokenize.tokenizers import SEGMENT_MAX, Encoder, encoder
from policies.latency.token_counts import TokenScale
from policies.types import PoolEstimate

pytestmark = pytest.mark.virtual_time

LONG = inspect.getsource(textwrap) + inspect.getsource(inspect)  # 140 KB
CL100K = encoder("cl100k_base")


class CountingEncoders:
    """The real cl100k_base, which records the encoded texts."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def __call__(self, name: str) -> Encoder:
        return Encoder(self._ids)

    def _ids(self, text: str) -> list[int]:
        self.encoded.append(text)
        return CL100K.encode(text)

    def new(self) -> list[str]:
        """The texts encoded since the last call."""
        taken, self.encoded = self.encoded, []
        return taken


def pool(tokenizer: str = "cl100k_base") -> TokenizerConfig:
    return TokenizerConfig(tokenizer, template=4)


def estimator(
    pools: Mapping[str, TokenizerConfig] | None = None, scale: TokenScale | None = None, **options: Any
) -> Estimator:
    return Estimator(pools or {"small": pool()}, lambda name: scale or TokenScale(), **options)


def chat(*texts: str, **more: Any) -> Prompt:
    """A conversation; user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return prompt_of(Operation.CHAT, {"model": "m", "messages": messages, **more})


def completion(prompt: Any) -> Prompt:
    return prompt_of(Operation.COMPLETION, {"model": "m", "prompt": prompt})


def guessed(of: Estimator, prompt: Prompt, group: str = "g", key: str = "web") -> PoolEstimate:
    """The estimate of one pool before the prompt is counted."""
    return of.estimate(PromptText(prompt, ["small"], group, key)).pools["small"]


def counted(of: Estimator, prompt: Prompt, group: str = "g", key: str = "web") -> PoolEstimate:
    """The estimate once the prompt is counted."""
    for _ in of.count(PromptText(prompt, ["small"], group, key)):
        pass
    return guessed(of, prompt, group, key)


def hashes(estimate: PoolEstimate) -> list[int]:
    return list(estimate.blocks.hashes)


# --------------------------------------------------------------------------- counting


def test_text_tokens_are_those_of_the_texts_alone() -> None:
    """The template is not text: its share is learned from reported usage."""
    texts = ["hello there", "general 天地", ""]
    assert guessed(estimator(), chat(*texts)).text_tokens == sum(CL100K.count(text) for text in texts)


def test_a_counted_text_counts_as_its_tokenizer_counts_it() -> None:
    """Reading by segments does not change the count."""
    found = counted(estimator(), completion(LONG))
    assert (found.text_tokens, found.margin) == (CL100K.count(LONG), 0)


def test_a_short_text_is_counted_at_once() -> None:
    """Up to a length at which a count takes no longer than an estimate."""
    text = LONG[: SHORT - 1]
    found = guessed(estimator(), chat(text, text + "!"))
    assert (found.text_tokens, found.margin) == (CL100K.count(text) + CL100K.count(text + "!"), 0)


def test_a_long_text_nobody_has_counted_is_estimated_within_its_margin() -> None:
    """All but a short last segment."""
    encoders = CountingEncoders()
    found = guessed(estimator(encoders=encoders), chat(LONG[:50_000]))
    assert len("".join(encoders.new())) <= SHORT
    assert 0 < abs(found.text_tokens - CL100K.count(LONG[:50_000])) < found.margin < found.tokens


def test_the_count_of_a_prompt_is_told_once_it_is_counted() -> None:
    """An engine's report teaches the scale of its pool by exact counts alone: no key's texts spoil it."""
    shared, prompt = estimator(), chat(LONG[:20_000], "why?")
    before = guessed(shared, prompt)
    assert before.count() == 0
    after = counted(shared, prompt)
    assert before.count() == after.count() == CL100K.count(LONG[:20_000]) + CL100K.count("why?")


def test_token_counts_are_corrected_by_reported_usage() -> None:
    """Usage reported by an engine with another tokenizer corrects the count."""
    scale = TokenScale()
    for _ in range(50):
        scale.observe(1000, 1, 1300)
    found = counted(estimator(scale=scale), chat(" word" * 1000))
    assert found.tokens == scale.correct(found.text_tokens, 1) == 1300


def test_all_blocks_together_have_the_tokens_of_the_prompt() -> None:
    """Counted in the engine's tokens."""
    found = counted(estimator(), chat("word " * 1000, "天地玄黄" * 100))
    assert found.blocks.ends is not None
    assert found.blocks.tokens(found.blocks.ends.depths[-1]) == pytest.approx(found.tokens)


def test_blocks_of_each_message_have_the_tokens_of_its_own_text() -> None:
    """Half of the bytes are a third of the tokens, where the other half is written in another script."""
    english, chinese = "word " * 600, "天地玄黄" * 250
    found = counted(estimator(), chat(english, chinese))
    first = len(english.encode()) / BLOCK_BYTES
    assert found.blocks.tokens(first) == pytest.approx(CL100K.count(english), rel=0.02)
    assert found.blocks.tokens(len(found.blocks.hashes)) > 2.5 * found.blocks.tokens(first)


def test_a_completion_has_no_messages() -> None:
    """A completion has no chat template."""
    assert guessed(estimator(), completion("once upon a time")).messages == 0


def test_token_ids_are_counted_as_they_are() -> None:
    """A tokenized prompt needs no tokenizer."""
    encoders = CountingEncoders()
    found = guessed(estimator(encoders=encoders), completion(CL100K.encode(LONG[:4000])))
    assert (found.text_tokens, found.margin) == (CL100K.count(LONG[:4000]), 0)
    assert (len(hashes(found)), encoders.new()) == (4 * found.text_tokens // BLOCK_BYTES, [])


def test_every_pool_of_the_route_gets_its_own_count() -> None:
    """Tokenizer and template are the pool's; blocks are of the text."""
    pools = {"small": pool(), "wide": TokenizerConfig("cl100k_base", template=9), "other": pool("o200k_base")}
    text = PromptText(chat("天地玄黄，宇宙洪荒。" * 40), list(pools), "g")
    shared = estimator(pools)
    assert list(shared.count(text))
    found = shared.estimate(text, 77)
    assert found.output_tokens == 77
    assert {name: view.text_tokens for name, view in found.pools.items()} == {
        "small": (count := CL100K.count("天地玄黄，宇宙洪荒。" * 40)),
        "wide": count,
        "other": encoder("o200k_base").count("天地玄黄，宇宙洪荒。" * 40),
    }
    assert len({tuple(view.blocks.hashes) for view in found.pools.values()}) == 1


def test_an_empty_prompt_has_no_blocks() -> None:
    """Nothing to count is not an error."""
    found = guessed(estimator(), completion(""))
    assert (found.text_tokens, hashes(found), found.margin) == (0, [], 0)


# --------------------------------------------------------------------------- prefixes

TEXT = st.text(max_size=60) | st.sampled_from(["word " * 600, "好" * 5000, "x" * 9000, "line\n" * 900])
TURNS = st.lists(TEXT, max_size=5)


@given(TURNS, TURNS)
@settings(deadline=None, max_examples=40)
def test_the_next_turn_keeps_all_full_blocks_of_a_conversation(before: list[str], after: list[str]) -> None:
    """The next turn begins with the blocks of this turn, also with an empty cache."""
    first = hashes(guessed(estimator(), chat(*before)))
    longer = hashes(guessed(estimator(), chat(*before, *after)))
    assert longer[: len(first)] == first


@given(st.lists(TURNS, max_size=6))
@settings(deadline=None, max_examples=40)
def test_the_cache_never_changes_a_count_or_a_block(conversations: list[list[str]]) -> None:
    """A warm cache gives the same as a cold one, even when almost full."""
    warm = estimator(cache_bytes=40_000)
    for texts in conversations:
        cold = estimator()
        first, again = guessed(warm, chat(*texts)), counted(warm, chat(*texts))
        assert hashes(first) == hashes(again) == hashes(guessed(cold, chat(*texts)))
        assert again.margin or again == counted(cold, chat(*texts))


ROLES = st.sampled_from(["user", "assistant", ""])
PARTS = st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), max_size=2)
SAID = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXT | PARTS}), min_size=1, max_size=4)
TALK = st.tuples(SAID, st.booleans(), st.booleans())


@given(st.lists(TALK, min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_every_way_through_finds_the_same(talks: list[tuple[list[dict[str, Any]], bool, bool]]) -> None:
    """As parsed from a caller's bytes, known or unknown, or decoded and cold."""
    warm = estimator()
    for messages, dense, tools in talks:
        body = {"model": "m", "messages": messages, **({"tools": [{"a": 1}, {"b": "c"}]} if tools else {})}
        raw = json.dumps(body, separators=(",", ":") if dense else None, ensure_ascii=dense).encode()
        expected = counted(estimator(), prompt_of(Operation.CHAT, body))
        for _ in range(2):
            assert counted(warm, parse(Operation.CHAT, raw, {}, 0.0, "").prompt) == expected


def test_another_role_is_another_prefix() -> None:
    """The same words in another role are rendered differently."""
    text = "word " * 40
    user, system = ({"model": "m", "messages": [{"role": role, "content": text}]} for role in ("user", "system"))
    first, second = (hashes(guessed(estimator(), prompt_of(Operation.CHAT, body))) for body in (user, system))
    assert not set(first) & set(second)


def test_groups_share_neither_blocks_nor_counts() -> None:
    """Neither estimates nor their timing tell one tenant the text of another."""
    encoders = CountingEncoders()
    shared = estimator(encoders=encoders)
    mine, theirs = (counted(shared, chat("secret " * 50), group=group) for group in "ab")
    assert not set(hashes(mine)) & set(hashes(theirs))
    assert encoders.new() == ["secret " * 50] * 2


def test_adapters_share_no_block_and_all_counts() -> None:
    """Engines hash the adapter into their blocks. One tenant's text is counted once for all of its adapters."""
    encoders = CountingEncoders()
    shared, prompt = estimator(encoders=encoders), chat("secret " * 50)
    texts = [PromptText(prompt, ["small"], "a", variants=each) for each in ({}, {"small": "x"}, {"small": "y"})]
    for text in texts:
        assert list(shared.count(text))
    pools = [shared.estimate(text).pools["small"] for text in texts]
    assert [pool.variant for pool in pools] == ["", "x", "y"]
    assert len({block for pool in pools for block in pool.blocks.hashes}) == 3 * len(pools[0].blocks.hashes)
    assert encoders.new() == ["secret " * 50]


def test_token_ids_are_not_the_text_that_their_bytes_spell() -> None:
    """Python hashes both alike."""
    text = "abcd" * 3000
    ids = array("I", text.encode()).tolist()
    for first, second in ((completion(text), completion(ids)), (completion(ids), completion(text))):
        warm = estimator()
        counted(warm, first)
        assert counted(warm, second) == counted(estimator(), second)
        assert not set(hashes(guessed(warm, first))) & set(hashes(guessed(warm, second)))


# --------------------------------------------------------------------------- cost


def test_a_conversation_costs_its_new_text() -> None:
    """Every message is counted once, however many turns repeat the message."""
    encoders = CountingEncoders()
    talk, texts = (
        estimator(encoders=encoders),
        ["system prompt", "first question", "an answer " * 40, "second question"],
    )
    for turn in range(1, len(texts) + 1):
        counted(talk, chat(*texts[:turn]))
        assert encoders.new() == texts[turn - 1 : turn]


def test_the_next_turn_of_a_counted_conversation_is_exact_but_for_its_new_text() -> None:
    """The margin is the new message's alone."""
    talk = estimator()
    counted(talk, chat(LONG[:60_000], "an answer"))
    found = guessed(talk, chat(LONG[:60_000], "an answer", LONG[60_000:61_000]))
    assert 0 < found.margin < 500
    assert abs(found.text_tokens - CL100K.count(LONG[:60_000]) - 250) < found.margin + 50


def test_a_text_that_grows_costs_its_last_segment() -> None:
    """A completion prompt is recognised from its beginning too."""
    encoders = CountingEncoders()
    growing = estimator(encoders=encoders)
    counted(growing, completion(LONG[:100_000]))
    encoders.new()
    counted(growing, completion(LONG[:101_000]))
    assert 0 < sum(map(len, encoders.new())) < 1000 + 2 * SEGMENT_MAX


def test_text_behind_a_new_beginning_is_not_counted_again() -> None:
    """A date in the system prompt changes all blocks, but not the tokens of the following messages."""
    encoders = CountingEncoders()
    dated, texts = estimator(encoders=encoders), [LONG[i : i + 2000] for i in range(0, 20_000, 2000)]
    counted(dated, chat("Monday", *texts))
    encoders.new()
    assert guessed(dated, chat("Tuesday", *texts)).margin == 0
    assert encoders.new() == ["Tuesday"]


def test_a_changed_long_message_is_counted_from_the_change_on() -> None:
    """A document with another question below it is recognised up to the question."""
    encoders = CountingEncoders()
    asked = estimator(encoders=encoders)
    counted(asked, chat("be brief", LONG[:100_000] + " Why?"))
    encoders.new()
    again = chat("be brief", LONG[:100_000] + " Since when?")
    found = counted(asked, again)
    assert sum(map(len, encoders.new())) <= 2 * SEGMENT_MAX
    assert found == counted(estimator(), again)


def test_pools_with_one_tokenizer_count_once() -> None:
    """Two templates are two prompts of the same text."""
    encoders = CountingEncoders()
    both = estimator({"a": pool(), "b": TokenizerConfig("cl100k_base", template=9)}, encoders=encoders)
    both.estimate(PromptText(chat("hello"), ["a", "b"]))
    assert encoders.new() == ["hello"]


def test_a_known_prompt_has_nothing_left_to_read() -> None:
    """What is left decides whether a prompt is read in a thread."""
    known, texts = estimator(), ["word " * 1000] * 4
    guessed(known, chat(*texts[:3]))
    prompts = [PromptText(raw_chat(*each), ["small"], "g") for each in (texts[:3], texts, ["new"])]
    left = [known.unread(known.recognise(prompt), prompt) for prompt in prompts]
    assert (left[0], left[1] > 5000 + TEXT_EFFORT, left[1] < 6000 + TEXT_EFFORT) == (0, True, True)


def test_of_a_long_message_that_has_grown_little_is_left_to_read() -> None:
    """Some clients write the whole conversation into one message: its known text needs no thread."""
    known, before = estimator(), raw_chat("be brief", LONG[:120_000])
    guessed(known, before)
    grown, other = (raw_chat("be brief", text + LONG[120_000:]) for text in (LONG[:120_000], LONG[1:120_000]))
    left = [
        known.unread(known.recognise(text), text) for text in (PromptText(x, ["small"], "g") for x in (grown, other))
    ]
    assert left[0] < 0.5 * left[1]
    assert left[1] > len(LONG) - len("be brief")


def test_parts_of_a_content_are_not_cut_before_a_thread_may_read_them() -> None:
    """Nobody knows yet how many there are."""
    known, texts = estimator(), [{"type": "text", "text": LONG[:20_000]}] * 3
    prompt = prompt_of(Operation.CHAT, {"messages": [{"role": "user", "content": texts}]})
    guessed(known, prompt)
    texts = [*texts, {"type": "text", "text": "more"}]
    grown = PromptText(prompt_of(Operation.CHAT, {"messages": [{"role": "user", "content": texts}]}), ["small"], "g")
    assert known.unread(known.recognise(grown), grown) == grown.prompt.effort


@given(st.lists(st.integers(0, 60_000), min_size=2, max_size=5), st.booleans())
@settings(deadline=None, max_examples=20)
def test_a_text_that_grows_shrinks_and_branches_has_the_blocks_of_its_bytes(cuts: list[int], branches: bool) -> None:
    """Known beginnings change no hash, whichever of them is known."""
    warm = estimator(cache_bytes=300_000)
    for number, cut in enumerate(cuts):
        text = LONG[:cut] + f" {number} " * (500 if branches else 0)
        for prompt in (chat("hello", text), completion(text)):
            assert hashes(guessed(warm, prompt)) == hashes(guessed(estimator(), prompt))


def raw_chat(*texts: str) -> Prompt:
    """The same prompt as parsed from a caller's bytes."""
    return parse(Operation.CHAT, json.dumps(body(*texts), separators=(",", ":")).encode(), {}, 0.0, "").prompt


def body(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"model": "m", "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


@pytest.mark.parametrize("tail", ["0123456789abcdef" * 1200, "word " * 4000])
def test_a_prefix_within_a_long_message_has_the_tokens_of_its_text(tail: str) -> None:
    """A document before a dump, or a dump before a document: neither is weighed by the other."""
    known, shared = estimator(), LONG[:20_000]
    for text in (shared + tail, tail + shared):
        whole, half = counted(known, chat(text)), counted(known, chat(text[: len(text) - len(text) // 2]))
        assert whole.blocks.tokens(len(half.blocks.hashes)) == pytest.approx(half.tokens, rel=0.05)


def test_memory_is_bounded() -> None:
    """Caches stay within their bytes under any traffic."""
    bounded = estimator(cache_bytes=100_000)
    for i in range(200):
        counted(bounded, chat(f"{i} {LONG[i : i + 3000]}"))
        assert bounded.cached_bytes <= 100_000
    assert bounded.cached_bytes > 50_000


@pytest.mark.parametrize("text", ["a" * 1_000_000, " " * 1_000_000, "😀" * 100_000, "<|endoftext|>" * 1000])
def test_hostile_text_is_estimated_and_counted(text: str) -> None:
    """No text fails, and no segment takes long: see test_tokenizers for the time."""
    hostile = estimator()
    assert 0 < guessed(hostile, chat(text)).tokens <= len(text.encode()) + 10
    assert counted(hostile, chat(text)).text_tokens == CL100K.count(text)
