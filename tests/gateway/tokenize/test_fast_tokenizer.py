"""The fast tokenizer: the reference's ids, and no word of another cache group."""

from __future__ import annotations

import inspect
import logging
import string
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from gateway.tokenize.comparison import Pack
from gateway.tokenize.estimator import Estimator, TokenizerConfig
from gateway.tokenize.fast_tokenizer import KEPT, FastTokenizer, fast_encoding, fast_json
from gateway.tokenize.tokenizers import SEGMENT_MAX, Encoder, encoder, load_ranks
from policies.latency.token_counts import TokenScale
from tests.gateway.tokenize.test_estimator import CountingThreads, chat

pytest.importorskip("splintr", reason="the extra fast-tokenizer is not installed")

ENCODINGS = ["o200k_base", "cl100k_base"]
CODE = inspect.getsource(textwrap) + inspect.getsource(inspect)  # 140 KB
TEXT = st.text(max_size=300) | st.text(string.printable, max_size=300) | st.text("aB1 '\n/.好é́😀\t", max_size=300)
SPECIAL = st.sampled_from(["<|endoftext|>", "<|im_start|>", "<s>", "</s>", "[CLS]", "<unk>", " ", "word"])


@cache
def loaded(name: str) -> tuple[FastTokenizer, Pack]:
    """The fast tokenizer and its reference."""
    found = encoder(name)
    assert found._fast is not None
    return found._fast, found._pack


def trained(folder: Path, model: Any, trainer: Any, before: Any, after: Any = None) -> str:
    """Path of a tokenizer.json."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = before
    tokenizer.train_from_iterator([CODE[i : i + 2000] for i in range(0, len(CODE), 2000)], trainer)
    if after is not None:
        tokenizer.post_processor = after
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As Llama 3: byte-level BPE, which begins every text with a token of its own."""
    special = ["<s>", "<|im_start|>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    begins = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return trained(
        tmp_path_factory.mktemp("bpe"), models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False), begins
    )


# --------------------------------------------------------------------------- ids


@pytest.mark.parametrize("name", ENCODINGS)
@given(text=TEXT | st.lists(SPECIAL, max_size=20).map("".join))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_the_ids_are_those_of_tiktoken(name: str, text: str) -> None:
    """Special tokens in the text are text."""
    fast, reference = loaded(name)
    assert fast.pack(text) == reference(text)


@given(text=TEXT | st.lists(SPECIAL, max_size=20).map("".join))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_the_ids_are_those_of_tokenizers(byte_level: str, text: str) -> None:
    """Special tokens in the text are special, and nothing is added around the text."""
    fast, reference = loaded(byte_level)
    assert fast.pack(text) == reference(text)


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_character_has_the_ids_that_tiktoken_gives(name: str) -> None:
    """Both know the same Unicode: a letter, digit or mark for the one is the same for the other."""
    fast, reference = loaded(name)
    characters = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    for start in range(0, len(characters), 64):
        text = "".join(f"a{each}b A{each}{each}1\n{each} {each}'s" for each in characters[start : start + 64])
        assert fast.pack(text) == reference(text)


def test_other_ids_leave_the_vocabulary_with_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    """Two tokens that changed their places are noticed."""
    ranks, (_, reference) = load_ranks("cl100k_base"), loaded("cl100k_base")
    ranks[b" the"], ranks[b" of"] = ranks[b" of"], ranks[b" the"]
    with caplog.at_level(logging.WARNING):
        assert fast_encoding("cl100k_base", ranks, reference) is None
    assert [record.getMessage() for record in caplog.records] == [
        "tokenizer cl100k_base: encoded by the reference, not by splintr-rs: its token ids differ"
    ]


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram"])
def test_a_vocabulary_whose_words_cannot_be_dropped_stays_with_the_reference(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """splintr keeps words of these as well, and has no way to drop them."""
    before = pre_tokenizers.Whitespace()
    if kind == "WordPiece":
        model: Any = models.WordPiece(unk_token="[UNK]")
        trainer: Any = trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[UNK]"], show_progress=False)
    else:
        model = models.Unigram()
        trainer = trainers.UnigramTrainer(
            vocab_size=500, unk_token="[UNK]", special_tokens=["[UNK]"], show_progress=False
        )
    path = trained(tmp_path, model, trainer, before)
    with caplog.at_level(logging.WARNING):
        assert encoder(path).library == "tokenizers"
    assert f"tokenizer {path}: encoded by the reference, not by splintr-rs" in caplog.text


def test_a_file_that_splintr_cannot_read_stays_with_the_reference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    assert fast_json(str(path), lambda text: b"", []) is None
    assert "encoded by the reference" in caplog.text


def test_without_the_extra_the_reference_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silently: nothing is missing."""
    monkeypatch.setitem(sys.modules, "splintr", None)  # marks a module which cannot be imported
    alone = encoder.__wrapped__("cl100k_base")
    assert (alone.library, encoder("cl100k_base").library) == ("tiktoken", "splintr-rs")
    assert alone.encode(CODE) == encoder("cl100k_base").encode(CODE)


# --------------------------------------------------------------------------- cache groups


class Watched:
    """splintr with cl100k_base, which records its known words before each text, and the texts of the reference."""

    def __init__(self, worth: float = 1000) -> None:
        import splintr

        self.tokenizer = splintr.Tokenizer.from_pretrained("cl100k_base")
        self.known_words: list[int] = []
        self.refused: list[str] = []
        self.fast = FastTokenizer(self._pack, self.tokenizer.clear_cache, speed=50e6, worth=worth)
        self.encoder = Encoder(self._reference, self.fast)

    def _pack(self, text: str) -> bytes:
        self.known_words.append(self.tokenizer.cache_len)
        packed: bytes = self.tokenizer.encode_flat(text)
        return packed

    def _reference(self, text: str) -> bytes:
        self.refused.append(text)
        return loaded("cl100k_base")[1](text)


async def test_a_tenants_text_finds_no_word_of_another_tenant() -> None:
    """Nothing of another cache group can shorten its time. Within a group words stay."""
    watched = Watched()
    shared = Estimator(
        {"p": TokenizerConfig("cl100k_base")}, lambda name: TokenScale(), encoders=lambda _: watched.encoder
    )
    for turn, group in enumerate("abbaba"):
        text = CODE[turn * 2000 :][:2000]  # one segment
        await shared.estimate(chat(text), ["p"], group, 1)
    first, second, third, fourth, fifth, sixth = watched.known_words
    assert first == second == fourth == fifth == sixth == 0 < third
    assert watched.refused == []
    shared.close()


def test_text_of_another_group_is_refused_while_a_text_is_read() -> None:
    """A word of the text being read would stay, however empty the tokenizer was."""
    watched, texts = Watched(), [CODE[:2000]]
    assert watched.fast.borrow("a", 2000)
    assert watched.fast.borrow("a", 2000)
    for users in (2, 1):
        found = watched.encoder.pack_segments(texts, "b")
        assert found == [loaded("cl100k_base")[1](texts[0])]
        assert len(watched.refused) == 3 - users
        watched.fast.give_back()
    watched.encoder.pack_segments(texts, "b")
    assert len(watched.refused) == 2


async def test_what_the_reference_reads_meanwhile_goes_to_a_thread_by_its_own_speed() -> None:
    """`tokenizers` takes 12 ms for what the fast tokenizer reads on the event loop."""
    watched, threads = Watched(), CountingThreads(1)
    shared = Estimator(
        {"p": TokenizerConfig("cl100k_base")},
        lambda name: TokenScale(),
        encoders=lambda _: watched.encoder,
        executor=threads,
    )
    assert watched.fast.borrow("other", 20_000)
    await shared.estimate(chat(CODE[:20_000]), ["p"], "mine", 1)
    assert (threads.given, bool(watched.refused)) == (1, True)
    await shared.estimate(chat(CODE[20_000:40_000]), ["p"], "other", 1)
    watched.fast.give_back()
    await shared.estimate(chat(CODE[40_000:60_000]), ["p"], "mine", 1)
    assert threads.given == 1
    shared.close()


def test_a_failure_gives_the_tokenizer_back() -> None:
    """The next group is not refused for ever."""
    watched = Watched()
    with pytest.raises(UnicodeEncodeError):
        watched.encoder.pack_segments(["\ud800" * 2000], "a")
    assert watched.fast.borrow("b", 2000)


def test_short_texts_get_the_tokenizer_when_they_are_worth_it_together() -> None:
    """Dropping the words takes as long as the reference takes for `worth` characters."""
    watched = Watched(worth=1000)
    watched.encoder.pack_segments(["x" * 1000], "a")
    taken = [watched.fast.borrow("b", 300) for _ in range(4)]
    assert taken == [False, False, False, True]


def test_groups_that_take_turns_with_short_texts_do_not_take_the_tokenizer() -> None:
    """Each would drop the other's words. The group that has it keeps it."""
    watched = Watched(worth=1000)
    watched.encoder.pack_segments(["x" * 1000], "a")
    assert [watched.fast.borrow(group, 600) for group in "bcabcbca"] == [group == "a" for group in "bcabcbca"]


@pytest.mark.parametrize("group", ["a", ""])
def test_words_are_dropped_after_a_bounded_length_of_text(group: str) -> None:
    """Words of a segment each would take 40 KB each."""
    watched, unseen = Watched(), ("好" * 2000 + chr(0x5000 + i) * 2000 for i in range(2 * KEPT // 4000))
    most = 0
    for text in unseen:
        watched.encoder.pack_segments([text], group)
        most = max(most, watched.tokenizer.cache_len)
    assert 1 < most <= KEPT // 4000 < len(watched.known_words)


@pytest.mark.parametrize("character", ["a", " ", "好", "😀"])
def test_a_run_of_one_character_is_encoded_by_segments(character: str) -> None:
    """The GIL is held for a segment at a time."""
    lengths: list[int] = []
    fast, _ = loaded("o200k_base")

    def pack(text: str) -> bytes:
        lengths.append(len(text))
        return fast.pack(text)

    Encoder(pack, FastTokenizer(pack, lambda: None, 50e6, 0)).count(character * 1_000_000)
    assert max(lengths) <= SEGMENT_MAX
