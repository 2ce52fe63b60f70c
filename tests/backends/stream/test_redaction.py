"""What of a prompt was cached is taken out of an answer, and our key; nothing else is touched."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.stream.redaction import CachedCountMasker, SecretMasker, UsageStripper
from tests.gateway.builders import DONE, FINISH, TOKEN, USAGE

SAYING_ALL = {
    "usage": {
        "prompt_tokens": 2048,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1920, "audio_tokens": 3},
        "prompt_cache_hit_tokens": 1920,
        "prompt_cache_miss_tokens": 128,
        "cache_read_input_tokens": 11,
        "cache_discount": -1.5e-3,
        "cachedContentTokenCount": 12,
    },
    "choices": [{"message": {"content": 'say "cached_tokens": 5, or {"cache": 6}', "role": "assistant"}}],
}


def read(hider: CachedCountMasker | SecretMasker, *reads: bytes) -> bytes:
    return b"".join(map(hider.feed, reads)) + hider.close()


@pytest.mark.parametrize("indent", [None, 2])
def test_every_count_is_zero_and_all_else_as_it_was(indent: int | None) -> None:
    """To the byte's place: what has a length keeps it. Text that looks like a count is text."""
    body = json.dumps(SAYING_ALL, indent=indent).encode()
    hidden = read(CachedCountMasker(), body)
    assert len(hidden) == len(body)
    said, usage = json.loads(hidden), json.loads(hidden)["usage"]
    assert said["choices"] == SAYING_ALL["choices"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2048, 7)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "audio_tokens": 3}
    assert [usage[name] for name in usage if "cache" in name] == [0] * 5


@given(st.lists(st.integers(0, 400), max_size=6))
def test_it_does_not_matter_where_the_bytes_were_torn(cuts: list[int]) -> None:
    """A count may come in two reads, and its key in three."""
    body = json.dumps(SAYING_ALL).encode()
    places = sorted({0, len(body), *(cut % len(body) for cut in cuts)})
    reads = [body[start:end] for start, end in pairwise(places)]
    assert read(CachedCountMasker(), *reads) == read(CachedCountMasker(), body)


def test_whole_events_pass_at_once() -> None:
    """Nobody waits for a token because of it."""
    hider = CachedCountMasker()
    for event in (TOKEN, FINISH, DONE):
        assert hider.feed(event) == event
    assert hider.close() == b""


def test_a_usage_that_was_not_asked_for_is_still_taken_out_whole() -> None:
    """What hides counts comes behind what strips the usage."""
    assert read(CachedCountMasker(UsageStripper()), TOKEN, USAGE + FINISH, DONE) == TOKEN + FINISH + DONE
    torn = USAGE[:100], USAGE[100:] + DONE
    assert read(CachedCountMasker(UsageStripper()), *torn) == DONE
    assert b'"cached_tokens":0}' in read(CachedCountMasker(), *torn)


KEY = b"sk-sk-backend-0123"
QUOTING = b'{"error":{"message":"wrong key sk-sk-sk-backend-0123, or sk-backend"}}'


@given(st.lists(st.integers(1, len(QUOTING) - 1), max_size=6, unique=True))
def test_our_key_is_hidden_wherever_the_bytes_were_torn(cuts: list[int]) -> None:
    """What only looks like its beginning is left alone."""
    places = [0, *sorted(cuts), len(QUOTING)]
    hidden = read(SecretMasker(KEY), *[QUOTING[start:end] for start, end in pairwise(places)])
    assert hidden == QUOTING.replace(KEY, b"*" * len(KEY))


def test_an_answer_in_one_read_is_not_held_back() -> None:
    """The usual one ends with its object."""
    mask = SecretMasker(KEY)
    assert mask.feed(b'{"choices":[]}') == b'{"choices":[]}'
    assert mask.close() == b""
