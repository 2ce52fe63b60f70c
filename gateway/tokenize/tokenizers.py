"""Text to token ids, by the name of a tiktoken encoding or the path of a tokenizer.json.

Rules:
- Nothing is downloaded and no environment variable is read: the ranks lie in `gateway/tokenize/data`.
- Text is text: `<|endoftext|>` in a prompt becomes the tokens of its letters, not an error.
- Any text is encoded, in time linear in its length: long texts segment by segment.
- An encoder is loaded once and may be used by several threads. tiktoken releases the GIL while encoding; `tokenizers`
  keeps it, for one segment at a time. Both keep nothing of a text.

tiktoken, not bpe-openai: a third less time on 2k to 200k characters of code is not worth a wheel of 74 MB and an
encoder which rejects 1 MB of one letter.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from functools import cache
from importlib import resources
from itertools import accumulate, pairwise
from pathlib import Path

import tiktoken

# The split patterns are part of the encodings' definition, as are the ranks (openai_public.py of tiktoken, MIT).
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}|{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"o200k_base": _O200K, "cl100k_base": _CL100K}
ID_BYTES = 4
ALIASES = {"o200k_harmony": "o200k_base"}  # gpt-oss: other special tokens, the same text

SEGMENT_MIN = 2048  # characters: 90 us to encode, 0.6 us to find again
SEGMENT_MAX = 4096  # characters
_SEGMENT_END = re.compile(r"\S(?= )|\n(?=[^\s/])")


class EncoderError(ValueError):
    """The tokenizer cannot be loaded; str() gives the reason, for the operator."""


class Encoder:
    """Encodes text. `ids`: token ids of a segment alone: nothing is added before or after."""

    def __init__(self, ids: Callable[[str], list[int]]) -> None:
        self._ids = ids

    def encode(self, text: str) -> list[int]:
        return [id for segment in segments(text) for id in self._ids(segment)]

    def count(self, text: str) -> int:
        return sum([len(self._ids(segment)) for segment in segments(text)])


@cache
def encoder(name_or_path: str) -> Encoder:
    """The encoder of a tiktoken encoding or a tokenizer.json. Raises EncoderError."""
    if name_or_path in ALIASES:
        return encoder(ALIASES[name_or_path])
    return _tiktoken(name_or_path) if name_or_path in PATTERNS else _hugging_face(name_or_path)


def segments(text: str) -> list[str]:
    """Cuts a long text where no token crosses; joined, the segments are the text. A short text is one segment.

    A cut depends only on the text before: a text which grows keeps all its segments but the last. A cut stands
    before a space after a visible character, or after a line end before visible text. The split patterns of
    o200k_base and cl100k_base end a piece there in any case, so the count is exact (but for punctuation, line end and
    `/` in a row, which o200k_base joins). A text without such a place is cut at SEGMENT_MAX all the same, one or two
    tokens off: tiktoken needs 0.35 s for a megabyte of one letter, and a million spaces overflow the stack of its
    regular expression engine. A tokenizer.json with a leading blank (SentencePiece) counts one token more per segment.
    """
    size = len(text)
    if size <= SEGMENT_MIN:
        return [text]
    parts, start = [], 0
    while size - start > SEGMENT_MIN:
        cut = _SEGMENT_END.search(text, start + SEGMENT_MIN, start + SEGMENT_MAX)
        end = cut.end() if cut else min(start + SEGMENT_MAX, size)
        parts.append(text[start:end])
        start = end
    if start < size:
        parts.append(text[start:])
    return parts


# -- tiktoken ----------------------------------------------------------------------------------


def _tiktoken(name: str) -> Encoder:
    ranks = load_ranks(name)
    encoding = tiktoken.Encoding(name, pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens={})
    ranks.clear()  # tiktoken works on a copy of its own; this dict takes 13 MB for o200k_base
    return Encoder(encoding.encode_ordinary)


def load_ranks(name: str) -> dict[bytes, int]:
    """Rank by token, in order of rank, of a bundled encoding."""
    return unpack_ranks(resources.files("gateway.tokenize").joinpath("data", f"{name}.ranks.gz").read_bytes())


def unpack_ranks(packed: bytes) -> dict[bytes, int]:
    """Rank by token of a file packed by `scripts/pack_ranks.py`."""
    raw = gzip.decompress(packed)
    count = int.from_bytes(raw[:4], "little")
    ends = accumulate(raw[4 : 4 + count], initial=4 + count)
    return {raw[start:end]: rank for rank, (start, end) in enumerate(pairwise(ends))}


# -- Hugging Face ------------------------------------------------------------------------------


def _hugging_face(name_or_path: str) -> Encoder:
    """Special tokens written out in the text are read as special: the engine does the same. Words of former texts are
    not kept: the time would tell a tenant another's words."""
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        known = ", ".join([*PATTERNS, *ALIASES])
        raise EncoderError(f"tokenizer '{name_or_path}': no such file, and not one of {known}")
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
    except ModuleNotFoundError:
        raise EncoderError(f"tokenizer '{path}' needs a package: pip install 'firsttoken[tokenizers]'") from None
    except Exception as error:  # tokenizers raises Exception itself, never a subclass
        raise EncoderError(f"tokenizer '{path}' is not a tokenizer.json: {error}") from error
    tokenizer.no_truncation()  # the file may carry the settings of its training run
    tokenizer.no_padding()
    if hasattr(tokenizer.model, "_resize_cache"):  # BPE and Unigram
        tokenizer.model._resize_cache(0)

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    return Encoder(ids)
