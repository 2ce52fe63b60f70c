"""splintr-rs (extra `fast-tokenizer`): the ids of tiktoken and `tokenizers` in a third to a twentieth of the time.

Rules:
- The reference, tiktoken or `tokenizers`, decides. Ids are compared at load; a vocabulary with other ids stays with the
  reference. So does one whose words splintr cannot drop: all but byte-level BPE.
- splintr keeps the words of former texts, and reads a text of known words faster: the time would tell a tenant which
  text another tenant has sent. One cache group at a time has the tokenizer, and finds it empty.
- Other texts are read by the reference, which keeps nothing: those of another group in the meantime, and those that
  take the reference less time than emptying takes.
- Words are dropped after 1 M characters: 65,536 words of a segment each would take 3 GB.

splintr holds the GIL while encoding: 1.3 ms for the worst segment found.
"""

from __future__ import annotations

import logging
import random
from array import array
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from math import inf
from threading import Lock
from typing import Any

from gateway.tokenize import comparison
from gateway.tokenize.comparison import Pack

FAST_LIBRARY = "splintr-rs"
KEPT = 1_000_000  # characters between two times of dropping all words: 0.4 ms of 15 ms
SAMPLED = 4000  # tokens of the vocabulary in the compared texts

log = logging.getLogger("firsttoken")


class FastTokenizer:
    """Encodes for one cache group at a time. `speed`: characters per second. `worth`: characters of another group's
    text for which words are dropped. Safe for several threads."""

    def __init__(self, pack: Pack, drop_words: Callable[[], None], speed: float, worth: float) -> None:
        self.speed = speed
        self._pack = pack
        self._drop_words = drop_words
        self._worth = worth
        self._lock = Lock()
        self._group: str | None = None
        self._users = 0  # who encode for the group at the moment
        self._kept = 0  # characters since words were dropped
        self._refused_group: str | None = None  # the last
        self._refused = 0  # characters that were refused to this group

    def is_free_for(self, group: str) -> bool:
        """No text of another group is being read. A text of `worth` characters would be taken now."""
        return group == self._group or not self._users

    def borrow(self, group: str, chars: int) -> bool:
        """Reserve the tokenizer for a text of so many characters. False: the reference is to read this text."""
        with self._lock:
            if group != self._group and not self._hand_over(group, chars):
                return False
            self._refused = 0
            self._users += 1
            return True

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1

    def pack(self, text: str) -> bytes:
        """Token ids of a segment. Between `borrow` and `give_back` only."""
        self._kept += len(text)
        if self._kept > KEPT:
            self._empty()
        return self._pack(text)

    def _hand_over(self, group: str, chars: int) -> bool:
        """A group of short texts gets the tokenizer when its texts together are worth it."""
        self._refused = chars + (self._refused if group == self._refused_group else 0)
        self._refused_group = group
        if self._users or self._refused < self._worth:
            return False
        self._empty()
        self._group = group
        return True

    def _empty(self) -> None:
        self._drop_words()
        self._kept = 0


# -- loading -----------------------------------------------------------------------------------


def fast_encoding(name: str, ranks: Mapping[bytes, int], reference: Pack) -> FastTokenizer | None:
    """An encoding of tiktoken. None without the extra, or where ids differ."""

    def load(splintr: Any) -> Any:
        lines = b"".join([b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()])
        return splintr.Tokenizer.from_bytes(lines, getattr(splintr, f"{name.upper()}_PATTERN"))

    sampled = random.Random(name).sample(list(ranks), SAMPLED)
    return _load(name, load, reference, [b"".join(sampled).decode("utf-8", "replace")])


def fast_json(path: str, reference: Pack, samples: Sequence[str]) -> FastTokenizer | None:
    """A tokenizer.json. `samples`: texts of its own tokens, special tokens included."""
    return _load(path, lambda splintr: splintr.from_json(path), reference, samples)


def _load(name: str, load: Callable[[Any], Any], reference: Pack, samples: Sequence[str]) -> FastTokenizer | None:
    try:
        import splintr
    except ModuleNotFoundError:
        return None
    try:
        tokenizer = load(splintr)
        tokenizer.clear_cache()
        pack = _pack_of(tokenizer)
        texts = comparison.texts(samples)
        if any(pack(text) != reference(text) for text in texts):
            raise ValueError("its token ids differ")
    except Exception as error:
        log.warning("tokenizer %s: encoded by the reference, not by %s: %s", name, FAST_LIBRARY, error)
        return None
    return _measured(pack, tokenizer.clear_cache, reference, texts)


def _pack_of(tokenizer: Any) -> Pack:
    """Ids of the text alone: a tokenizer.json may add some before and after."""
    if not tokenizer.encode_flat(""):
        flat: Pack = tokenizer.encode_flat
        return flat
    return lambda text: array("I", tokenizer.encode_raw(text)).tobytes()


def _measured(pack: Pack, drop_words: Callable[[], None], reference: Pack, texts: Sequence[str]) -> FastTokenizer:
    speed = comparison.speed(pack, before=drop_words)
    dropping = comparison.seconds(drop_words, before=lambda: [pack(text) for text in texts])
    saved = 1 / comparison.speed(reference) - 1 / speed  # s per character
    return FastTokenizer(pack, drop_words, speed, dropping / saved if saved > 0 else inf)
