"""Encoders: offline, exact, and safe on any text of a caller."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from gateway.tokenize.tokenizers import (
    SEGMENT_MAX,
    SEGMENT_MIN,
    Encoder,
    EncoderError,
    encoder,
    load_ranks,
    segments,
    unpack_ranks,
)
from scripts.pack_ranks import pack_ranks, published_ranks

PUBLISHED = {  # SHA-256, as tiktoken's openai_public.py expects them
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
}
ENCODINGS = list(PUBLISHED)
URL = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"
CODE = inspect.getsource(inspect) + inspect.getsource(argparse)  # 220 KB
PROSE = (
    "It was the best of times, it was the worst of times; it was the age of wisdom.\n\n- a list item\n"
    "  - and one below it, with 1234567 numbers / slashes // and “quotes”\n\n\n    indented: yes\r\n"
)
EMOJI = "👩‍👩‍👧‍👦🏳️‍🌈 ok 👍🏽 "
CJK = "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。\n寒来暑往，秋收冬藏。"
TEXTS = {"code": CODE, "prose": PROSE * 200, "emoji": EMOJI * 600, "cjk": CJK * 300, "base64": "QUJD/+" * 5000}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tiktoken.Encoding]]:
    """tiktoken's own encodings, from the bundled rank files in the place of its downloads."""
    folder = tmp_path_factory.mktemp("tiktoken")
    for name in ENCODINGS:
        key = hashlib.sha1(URL.format(name).encode()).hexdigest()
        (folder / key).write_bytes(published_ranks(load_ranks(name)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield {name: tiktoken.get_encoding(name) for name in ENCODINGS}


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE with the truncation and padding of its training run."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([PROSE], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("name", ENCODINGS)
@given(text=st.text(max_size=300))
@settings(max_examples=60, deadline=None)
def test_short_text_gets_the_tokens_that_tiktoken_gives(
    published: dict[str, tiktoken.Encoding], name: str, text: str
) -> None:
    """Up to a segment there is no difference at all."""
    assert encoder(name).encode(text) == published[name].encode_ordinary(text)


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", ENCODINGS)
def test_long_text_counts_as_tiktoken_counts_it(published: dict[str, tiktoken.Encoding], name: str, kind: str) -> None:
    """In text with spaces or lines segments change nothing; elsewhere less than 0.1%."""
    ours, theirs = encoder(name).count(TEXTS[kind]), len(published[name].encode_ordinary(TEXTS[kind]))
    allowed = 0.001 * theirs if kind == "base64" else 0
    assert abs(ours - theirs) <= allowed


@pytest.mark.parametrize("name", ENCODINGS)
def test_special_tokens_in_text_are_text(name: str) -> None:
    """<|endoftext|> neither fails nor ends anything."""
    text = "before <|endoftext|> <|fim_prefix|> <|endofprompt|> after"
    assert encoder(name).count(text) > len(text.split())


def test_special_tokens_in_text_are_encoded_as_plain_text(published: dict[str, tiktoken.Encoding]) -> None:
    """The encoder knows no special token, so none is found."""
    text = "before<|endoftext|> <|fim_prefix|><|endofprompt|> after"
    assert encoder("o200k_base").encode(text) == published["o200k_base"].encode_ordinary(text)


def test_a_count_is_the_number_of_ids() -> None:
    """Of any text."""
    ours = encoder("o200k_base")
    for text in ("", "hello", CODE[:20_000], EMOJI):
        assert ours.count(text) == len(ours.encode(text))


@pytest.mark.parametrize("alphabet", ["a", " ", "\n", "ab", string.ascii_letters, "好", "!?", "\x00", "😀"])
def test_no_text_takes_more_than_linear_time(alphabet: str) -> None:
    """tiktoken, whose time grows faster than a text without a place to cut, gets each character once and never more
    than SEGMENT_MAX of them."""
    text = "".join(random.Random(7).choices(alphabet, k=300_000))
    given: list[str] = []

    def ids(segment: str) -> list[int]:
        given.append(segment)
        return encoder("o200k_base").encode(segment)

    assert Encoder(ids).encode(text) == encoder("o200k_base").encode(text)
    assert "".join(given) == text
    assert max(map(len, given)) <= SEGMENT_MAX


def test_a_million_spaces_are_counted() -> None:
    """In one piece, a million spaces overflow the stack of tiktoken's regular expression engine."""
    assert encoder("o200k_base").count(" " * 1_000_000) > 0


def test_an_encoder_is_loaded_once() -> None:
    """Ranks take 0.2 s to load; aliases share an encoder."""
    assert encoder("o200k_base") is encoder("o200k_base")


def test_harmony_text_is_o200k_text() -> None:
    """gpt-oss differs in special tokens only, and needs no ranks of its own."""
    assert encoder("o200k_harmony") is encoder("o200k_base")


def test_a_tokenizer_json_reads_text_alone_and_whole(tokenizer_json: Path) -> None:
    """Nothing is added around the text, nothing cut off: truncation and padding are of the training run."""
    plain = Tokenizer.from_file(str(tokenizer_json))
    plain.no_truncation()
    plain.no_padding()
    assert encoder(str(tokenizer_json)).encode(PROSE) == plain.encode(PROSE, add_special_tokens=False).ids


@pytest.mark.parametrize("model", [models.BPE(), models.Unigram()])
def test_tokenizers_can_be_told_to_keep_no_words(model: models.Model) -> None:
    """Its cache of words is shared by all tenants. A release without this way to turn it off is not to be used."""
    model._resize_cache(0)


def test_a_model_folder_stands_for_the_tokenizer_json_in_it(tokenizer_json: Path) -> None:
    """Models are downloaded as folders."""
    assert encoder(str(tokenizer_json.parent)).encode("hello") == encoder(str(tokenizer_json)).encode("hello")


def test_an_unknown_tokenizer_is_refused_with_the_known_names() -> None:
    """A misspelt name is not a file either."""
    with pytest.raises(EncoderError, match="'o200k': no such file, and not one of o200k_base, cl100k_base"):
        encoder("o200k")


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    """The message names the file."""
    path = tmp_path / "notes.txt"
    path.write_text("not JSON")
    with pytest.raises(EncoderError, match=r"notes\.txt' is not a tokenizer\.json"):
        encoder(str(path))


def test_a_missing_package_is_named_with_the_way_to_get_it(
    tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tokenizers is an extra: the error names the install command."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # marks a module which cannot be imported
    with pytest.raises(EncoderError, match=r"pip install 'firsttoken\[tokenizers\]'"):
        encoder.__wrapped__(str(tokenizer_json))


# --------------------------------------------------------------------------- segments

WORDS = st.sampled_from(["word", " ", "\n", "  ", "\n\n", "/", "}", "  \n", "x" * 700, "好" * 900, "\t", ".\n/", "é"])
CUTTABLE = st.lists(WORDS, max_size=60).map("".join)


@given(CUTTABLE)
def test_joined_segments_are_the_text(text: str) -> None:
    """Nothing is lost, doubled or moved."""
    assert "".join(segments(text)) == text


@given(CUTTABLE)
def test_no_segment_is_longer_than_the_longest(text: str) -> None:
    """The text encoded at a time is bounded."""
    assert max(map(len, segments(text))) <= SEGMENT_MAX


@given(CUTTABLE, CUTTABLE)
def test_a_growing_text_keeps_all_segments_except_the_last(text: str, more: str) -> None:
    """Cuts depend only on the text before."""
    before = segments(text)
    assert segments(text + more)[: len(before) - 1] == before[:-1]


def test_a_cut_stands_before_a_space() -> None:
    """The space belongs to the next word, as in the tokens."""
    assert segments("a" * 3000 + " b c") == ["a" * 3000, " b c"]


def test_a_cut_stands_after_a_line_end_where_there_are_no_spaces() -> None:
    """Chinese prose has no spaces but paragraphs."""
    assert segments("好" * SEGMENT_MIN + "。\n" + "好" * 10) == ["好" * SEGMENT_MIN + "。\n", "好" * 10]


@pytest.mark.parametrize("text", ["", "short", "x" * SEGMENT_MIN])
def test_a_short_text_is_one_segment(text: str) -> None:
    """Most messages are not cut at all."""
    assert segments(text) == [text]


# --------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_bundled_ranks_are_byte_for_byte_the_published_file(name: str) -> None:
    """Unpacked and written out again, a rank file has the published digest."""
    assert hashlib.sha256(published_ranks(load_ranks(name))).hexdigest() == PUBLISHED[name]


def test_packing_loses_nothing() -> None:
    """Packing and unpacking keeps the text, tokens of any bytes included."""
    text = b"IQ== 0\nAAEC/w== 1\n8J+Yug== 2\n"
    assert published_ranks(unpack_ranks(pack_ranks(text))) == text


def test_a_rank_file_with_a_gap_is_not_packed() -> None:
    """Ranks are not stored, so each must equal its line number."""
    with pytest.raises(ValueError, match="line 2 has rank 5"):
        pack_ranks(b"IQ== 0\nIg== 5\n")
