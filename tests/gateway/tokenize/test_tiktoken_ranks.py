"""The bundled rank files are the published ones."""

from __future__ import annotations

import hashlib

import pytest

from gateway.tokenize import tiktoken_ranks as ranks

PUBLISHED = {  # SHA-256, as tiktoken's openai_public.py expects them
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_bundled_ranks_are_byte_for_byte_the_published_file(name: str) -> None:
    """Unpacked and written out again, a rank file has the digest that its publisher names."""
    assert hashlib.sha256(ranks.text(ranks.load(name))).hexdigest() == PUBLISHED[name]


def test_packing_loses_nothing() -> None:
    """A packed rank file gives its text back, tokens of any bytes included."""
    text = b"IQ== 0\nAAEC/w== 1\n8J+Yug== 2\n"
    assert ranks.text(ranks.unpack(ranks.pack(text))) == text


def test_a_rank_file_with_a_gap_is_not_packed() -> None:
    """Ranks are not stored, so they must be the line numbers."""
    with pytest.raises(ValueError, match="line 2 has rank 5"):
        ranks.pack(b"IQ== 0\nIg== 5\n")
