"""The estimator: tokens and prefix blocks of a prompt, at the cost of its new text."""

from __future__ import annotations

import asyncio
import inspect
import json
import textwrap
from array import array
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.interface import Operation
from gateway.api.inference_request import parse
from gateway.tokenize.estimator import Estimator, TokenizerConfig
from gateway.tokenize.prompt import Prompt, prompt_of
from gateway.tokenize.tokenizers import Encoder, encoder
from policies.latency.token_counts import TokenScale
from policies.types import PoolEstimate

pytestmark = pytest.mark.virtual_time

LONG = inspect.getsource(textwrap) + inspect.getsource(inspect)  # 140 KB
CL100K = encoder("cl100k_base")
SLOW = Encoder(CL100K.pack, speed=20e6)


class CountingEncoders:
    """The real cl100k_base, which records the encoded texts."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def __call__(self, name: str) -> Encoder:
        return Encoder(self._pack)

    def _pack(self, text: str) -> bytes:
        self.encoded.append(text)
        return CL100K.pack(text)

    def new(self) -> list[str]:
        """The texts encoded since the last call, without the empty texts of empty messages."""
        taken, self.encoded = [text for text in self.encoded if text], []
        return taken


class CountingThreads(ThreadPoolExecutor):
    """A thread pool which counts its tasks."""

    given = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.given += 1
        return super().submit(fn, *args, **kwargs)


def pool(block_size: int = 16, tokenizer: str = "cl100k_base") -> TokenizerConfig:
    return TokenizerConfig(tokenizer, block_size, template=4)


def estimator(
    pools: Mapping[str, TokenizerConfig] | None = None, scale: TokenScale | None = None, **options: Any
) -> Estimator:
    return Estimator(pools or {"small": pool()}, lambda name: scale or TokenScale(), **options)


def chat(*texts: str, **more: Any) -> Prompt:
    """A conversation; user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return prompt_of(Operation.CHAT, {"model": "m", "messages": messages, **more})


def raw_chat(*texts: str) -> Prompt:
    """The same prompt as parsed from a caller's bytes."""
    messages = [{"role": "user", "content": text} for text in texts]
    return parse(Operation.CHAT, json.dumps({"model": "m", "messages": messages}).encode(), {}, 0.0, "").prompt


def completion(prompt: Any) -> Prompt:
    return prompt_of(Operation.COMPLETION, {"model": "m", "prompt": prompt})


def read(of: Estimator, prompt: Prompt, name: str = "small", group: str = "g") -> PoolEstimate:
    """The estimate of one pool."""
    return asyncio.run(of.estimate(prompt, [name], group, 256)).pools[name]


def hashes(estimate: PoolEstimate) -> list[int]:
    return list(estimate.blocks.hashes)


# --------------------------------------------------------------------------- counting


def test_text_tokens_are_those_of_the_texts_alone() -> None:
    """The template is not text: its share is learned from reported usage."""
    texts = ["hello there", "general 天地", ""]
    assert read(estimator(), chat(*texts)).text_tokens == sum(CL100K.count(text) for text in texts)


def test_a_long_text_counts_as_its_tokenizer_counts_it() -> None:
    """Reading by segments does not change the count."""
    found = read(estimator(inline=inf), completion(LONG))
    assert found.text_tokens == CL100K.count(LONG)


def test_token_counts_are_corrected_by_reported_usage() -> None:
    """Usage reported by an engine with another tokenizer corrects the count."""
    scale = TokenScale()
    for _ in range(50):
        scale.observe(1000, 1, 1300)
    found = read(estimator(scale=scale), chat(" word" * 1000))
    assert found.tokens == scale.correct(found.text_tokens, 1) == 1300


def test_blocks_carry_the_scale_from_counted_to_real_tokens() -> None:
    """A block of 16 counted tokens is worth `scale` times as many of the engine's."""
    found = read(estimator(), chat("word " * 1000))
    counted = found.text_tokens + 4 * found.messages
    assert found.blocks.scale == found.tokens / counted


def test_a_completion_has_no_messages() -> None:
    """A completion has no chat template."""
    assert read(estimator(), completion("once upon a time")).messages == 0


def test_token_ids_are_counted_as_they_are() -> None:
    """A tokenized prompt gets the blocks of its ids."""
    found = read(estimator(), completion(CL100K.encode(LONG[:4000])))
    assert hashes(found) == hashes(read(estimator(), completion(LONG[:4000])))


def test_every_pool_of_the_route_gets_its_own_view() -> None:
    """Tokenizer and block size are the pool's."""
    pools = {"small": pool(16), "wide": pool(32), "other": pool(16, "o200k_base")}
    prompt = chat("天地玄黄，宇宙洪荒。" * 40)
    found = asyncio.run(estimator(pools).estimate(prompt, ["small", "wide", "other"], "g", 77))
    assert found.output_tokens == 77
    sizes = {name: len(view.blocks.hashes) for name, view in found.pools.items()}
    texts = {name: view.text_tokens for name, view in found.pools.items()}
    assert texts == {
        "small": (count := CL100K.count("天地玄黄，宇宙洪荒。" * 40)),
        "wide": count,
        "other": encoder("o200k_base").count("天地玄黄，宇宙洪荒。" * 40),
    }
    assert sizes == {name: (texts[name] + 4) // size for name, size in (("small", 16), ("wide", 32), ("other", 16))}


def test_an_empty_prompt_has_no_blocks() -> None:
    """Nothing to count is not an error."""
    found = read(estimator(), completion([]))
    assert (found.text_tokens, hashes(found), found.blocks.scale) == (0, [], 1.0)


# --------------------------------------------------------------------------- prefixes

TEXT = st.text(max_size=60) | st.sampled_from(["word " * 600, "好" * 5000, "x" * 9000, "line\n" * 900])
TURNS = st.lists(TEXT, max_size=5)


@given(TURNS, TURNS)
@settings(deadline=None, max_examples=40)
def test_the_next_turn_keeps_all_full_blocks_of_a_conversation(before: list[str], after: list[str]) -> None:
    """The next turn begins with the blocks of this turn, also with an empty cache."""
    first = hashes(read(estimator(inline=inf), chat(*before)))
    longer = hashes(read(estimator(inline=inf), chat(*before, *after)))
    assert longer[: len(first)] == first


@given(st.lists(TURNS, max_size=6))
@settings(deadline=None, max_examples=40)
def test_the_cache_never_changes_an_estimate(conversations: list[list[str]]) -> None:
    """A warm cache gives the same estimate as a cold one, even when almost full."""
    warm = estimator(inline=inf, cache_bytes=20_000)
    for texts in conversations:
        assert read(warm, chat(*texts)) == read(estimator(inline=inf), chat(*texts))


ROLES = st.sampled_from(["user", "assistant", ""])
PARTS = st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), max_size=2)
SAID = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXT | PARTS}), min_size=1, max_size=4)
TALK = st.tuples(SAID, st.booleans(), st.booleans())


@given(st.lists(TALK, min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
async def test_every_way_through_finds_the_same(talks: list[tuple[list[dict[str, Any]], bool, bool]]) -> None:
    """As parsed from a caller's bytes, known or unknown, on the loop or in a thread, or decoded and cold."""
    here, away, nearby = estimator(), estimator(inline=0, open_bytes=0), estimator(inline=inf)
    for messages, dense, tools in talks:
        body = {"model": "m", "messages": messages, **({"tools": [{"a": 1}, {"b": "c"}]} if tools else {})}
        raw = json.dumps(body, separators=(",", ":") if dense else None, ensure_ascii=dense).encode()
        expected = await estimator(inline=inf).estimate(prompt_of(Operation.CHAT, body), ["small"], "g", 1)
        for way in (here, away, nearby, nearby):
            prompt = parse(Operation.CHAT, raw, {}, 0.0, "").prompt
            assert await way.estimate(prompt, ["small"], "g", 1) == expected
    for way in (here, away, nearby):
        way.close()


def test_another_role_is_another_prefix() -> None:
    """The same words in another role are rendered differently."""
    text = "word " * 40
    user, system = ({"model": "m", "messages": [{"role": role, "content": text}]} for role in ("user", "system"))
    first, second = (hashes(read(estimator(), prompt_of(Operation.CHAT, body))) for body in (user, system))
    assert not set(first) & set(second)


def test_groups_share_neither_blocks_nor_tokenised_text() -> None:
    """Neither estimates nor their timing tell one tenant the text of another."""
    encoders = CountingEncoders()
    shared = estimator(encoders=encoders)
    mine, theirs = read(shared, chat("secret " * 50), group="a"), read(shared, chat("secret " * 50), group="b")
    assert not set(hashes(mine)) & set(hashes(theirs))
    assert encoders.new() == ["secret " * 50] * 2


async def test_adapters_share_no_block_and_all_tokenised_text() -> None:
    """Engines hash the adapter into their blocks. One tenant's text is encoded once for all of its adapters."""
    encoders = CountingEncoders()
    shared, prompt = estimator(encoders=encoders), chat("secret " * 50)
    found = [
        await shared.estimate(prompt, ["small"], "a", 1, adapters) for adapters in ({}, {"small": "x"}, {"small": "y"})
    ]
    pools = [one.pools["small"] for one in found]
    assert [pool.adapter for pool in pools] == ["", "x", "y"]
    assert len({block for pool in pools for block in pool.blocks.hashes}) == 3 * len(pools[0].blocks.hashes)
    assert encoders.new() == ["secret " * 50]


def test_token_ids_are_not_the_text_that_their_bytes_spell() -> None:
    """Python hashes both alike."""
    text = "abcd" * 3000
    ids = array("I", text.encode()).tolist()
    for first, second in ((completion(text), completion(ids)), (completion(ids), completion(text))):
        warm = estimator(inline=inf)
        read(warm, first)
        assert read(warm, second) == read(estimator(inline=inf), second)


def test_a_learned_block_size_counts_from_the_next_prompt_on() -> None:
    """The server's block size overrides the file's."""
    learned, prompt = estimator({"small": pool(16)}), chat("word " * 200)
    read(learned, prompt)
    learned.set_block_size("small", 32)
    assert read(learned, prompt) == read(estimator({"small": pool(32)}), prompt)


# --------------------------------------------------------------------------- cost


def test_a_conversation_costs_its_new_text() -> None:
    """Every message is tokenized once, however many turns repeat the message."""
    encoders = CountingEncoders()
    talk, texts = estimator(encoders=encoders), ["system prompt", "first question", "an answer", "second question"]
    for turn in range(1, len(texts) + 1):
        read(talk, chat(*texts[:turn]))
        assert encoders.new() == texts[turn - 1 : turn]


def test_a_text_that_grows_costs_its_last_segment() -> None:
    """A completion prompt is recognised from its beginning too."""
    encoders = CountingEncoders()
    growing = estimator(encoders=encoders, inline=inf)
    read(growing, completion(LONG[:100_000]))
    encoders.new()
    read(growing, completion(LONG[:101_000]))
    assert sum(map(len, encoders.new())) < 1000 + 2 * 2048


def test_text_behind_a_new_beginning_is_not_tokenised_again() -> None:
    """A date in the system prompt changes all blocks, but not the token ids of the following messages."""
    encoders = CountingEncoders()
    dated = estimator(encoders=encoders, inline=inf)
    read(dated, chat("Monday", *[LONG[i : i + 2000] for i in range(0, 20_000, 2000)]))
    encoders.new()
    read(dated, chat("Tuesday", *[LONG[i : i + 2000] for i in range(0, 20_000, 2000)]))
    assert encoders.new() == ["Tuesday"]


def test_a_changed_long_message_is_encoded_from_the_change_on() -> None:
    """A document with another question below it is recognised up to the question."""
    encoders = CountingEncoders()
    asked = estimator(encoders=encoders, inline=inf)
    read(asked, chat("be brief", LONG[:100_000] + " Why?"))
    encoders.new()
    again = chat("be brief", LONG[:100_000] + " Since when?")
    found = read(asked, again)
    assert sum(map(len, encoders.new())) <= 2 * 2048
    assert found == read(asked, again) == read(estimator(inline=inf), again)


def test_pools_with_one_tokenizer_tokenise_once() -> None:
    """Two block sizes are two chains of blocks over the same tokens."""
    encoders = CountingEncoders()
    both = estimator({"a": pool(16), "b": pool(32)}, encoders=encoders)
    asyncio.run(both.estimate(chat("hello"), ["a", "b"], "g", 1))
    assert encoders.new() == ["hello"]


async def test_only_large_new_text_is_encoded_in_a_thread() -> None:
    """Small or known prompts are answered without a task switch."""
    threads = CountingThreads(1)
    mixed = estimator(executor=threads, encoders=lambda name: SLOW)
    await mixed.estimate(chat("small"), ["small"], "g", 1)
    assert threads.given == 0
    large = await mixed.estimate(chat(LONG[:20_000]), ["small"], "g", 1)
    assert threads.given == 1
    again = await mixed.estimate(chat(LONG[:20_000]), ["small"], "g", 1)
    assert (threads.given, again) == (1, large)
    mixed.close()


@pytest.mark.parametrize(("speed", "in_threads"), [(2e6, 3), (20e6, 2), (60e6, 1)])
async def test_what_is_large_follows_the_speed_of_the_encoder(speed: float, in_threads: int) -> None:
    """2, 8 and 100 KB never seen, by three encoders: those that take longer than 0.6 ms go to a thread."""
    threads = CountingThreads(1)
    measured = estimator(executor=threads, encoders=lambda name: Encoder(CL100K.pack, speed=speed))
    for number, size in enumerate((2_000, 12_000, 100_000)):
        await measured.estimate(chat(str(number) + LONG[:size]), ["small"], "g", 1)
    assert threads.given == in_threads
    measured.close()


async def test_other_scripts_count_as_three_times_as_long() -> None:
    """A character of them takes up to four bytes and as many tokens."""
    threads = CountingThreads(1)
    measured = estimator(executor=threads, encoders=lambda name: Encoder(CL100K.pack, speed=20e6))
    for text in ("a" * 6_000, "好" * 6_000):
        await measured.estimate(chat(text), ["small"], "g", 1)
    assert threads.given == 1
    measured.close()


async def test_a_thread_and_the_loop_give_equal_estimates() -> None:
    """The estimate is the same in a thread and on the loop."""
    threaded, direct = estimator(inline=0), estimator(inline=inf)
    prompt = chat(LONG[:50_000], "and then?")
    found = await threaded.estimate(prompt, ["small"], "g", 1)
    assert found == await direct.estimate(prompt, ["small"], "g", 1)
    threaded.close()


async def test_a_block_size_learned_meanwhile_does_not_disturb_an_estimate() -> None:
    """An estimate under way keeps its block size."""
    changing = estimator(inline=0)
    under_way = asyncio.create_task(changing.estimate(chat(LONG[:5_000]), ["small"], "g", 1))
    await asyncio.sleep(0)
    changing.set_block_size("small", 32)
    assert (await under_way).pools["small"].blocks.size == 16
    changing.close()


async def test_a_prompt_which_is_long_to_decode_is_decoded_in_a_thread() -> None:
    """Only the unknown rest counts."""
    threads = CountingThreads(1)
    far = estimator(inline=inf, open_bytes=10_000, executor=threads)
    texts = ["word " * 1000] * 4
    for turn in range(1, 5):
        await far.estimate(raw_chat(*texts[:turn]), ["small"], "g", 1)
    assert threads.given == 0
    await far.estimate(raw_chat(*texts), ["small"], "another", 1)
    assert threads.given == 1
    far.close()


async def test_many_short_messages_count_as_large() -> None:
    """Each message has a cost of its own."""
    threads = CountingThreads(1)
    busy = estimator(executor=threads)
    for count in (50, 500, 5_000):
        await busy.estimate(raw_chat(*[str(count)] * count), ["small"], "g", 1)
    assert threads.given == 2
    busy.close()


async def test_others_get_their_turn_while_a_long_prompt_is_read_and_remembered() -> None:
    """Both are done in the thread."""
    threads = CountingThreads(1)
    large = estimator(open_bytes=0, inline=0, executor=threads)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(others())
    texts = [f"message {i}" for i in range(3_000)]
    first = await large.estimate(raw_chat(*texts), ["small"], "g", 1)
    other.cancel()
    assert turns >= 6
    assert await large.estimate(raw_chat(*texts), ["small"], "g", 1) == first
    assert threads.given == 1
    large.close()


def test_memory_is_bounded() -> None:
    """Caches stay within their bytes under any traffic."""
    bounded = estimator(cache_bytes=100_000, inline=inf)
    for i in range(200):
        read(bounded, chat(f"{i} {LONG[i : i + 3000]}"))
        assert bounded.cached_bytes <= 100_000
    assert bounded.cached_bytes > 50_000


@pytest.mark.parametrize("text", ["a" * 1_000_000, " " * 1_000_000, "😀" * 100_000, "<|endoftext|>" * 1000])
async def test_hostile_text_is_estimated(text: str) -> None:
    """No text fails, and none holds the loop: see test_tokenizers for the time."""
    hostile = estimator()
    found = await hostile.estimate(chat(text), ["small"], "g", 1)
    assert found.pools["small"].tokens > 0
    hostile.close()
