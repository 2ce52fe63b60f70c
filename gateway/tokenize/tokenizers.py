"""Text to token ids, by the name of a tiktoken encoding or the path of a tokenizer.json.

Rules:
- Nothing is downloaded and no environment variable is read: the ranks lie in `gateway/tokenize/data`.
- Text is text: a caller who writes `<|endoftext|>` gets the tokens of those letters, not an error.
- Any text is encoded, in time linear in its length: long ones segment by segment (`gateway.tokenize.segments`).
- An encoder is loaded once and may be used by several threads. tiktoken gives up the GIL while it works;
  tokenizers keeps it, for one segment at a time.

tiktoken, not bpe-openai: on 2k, 20k and 200k characters of code it took 0.06, 0.8 and 8.5 ms against
0.05, 0.5 and 5.9. That third is not worth 74 MB of wheel, nor an encoder that refuses 1 MB of one letter.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tiktoken

from gateway.tokenize import tiktoken_ranks as ranks
from gateway.tokenize.segments import LONGEST, segments

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
_UNSAID = "\0firsttoken knows no special token\0"


class EncoderError(ValueError):
    """The tokenizer cannot be had; str() says why, for the operator."""


class Encoder:
    """One vocabulary."""

    __slots__ = ("_pack",)

    def __init__(self, pack: Callable[[str], bytes]) -> None:
        self._pack = pack

    def pack(self, text: str) -> bytes:
        """Token ids of the text alone, as unsigned 32 bits each: nothing is added before or after."""
        if len(text) <= LONGEST:
            return self._pack(text)
        return b"".join(map(self._pack, segments(text)))

    def encode(self, text: str) -> list[int]:
        """The same as numbers."""
        return array("I", self.pack(text)).tolist()

    def count(self, text: str) -> int:
        """How many tokens that is."""
        return len(self.pack(text)) // ID_BYTES


@cache
def encoder(name_or_path: str) -> Encoder:
    """The encoder of a tiktoken encoding or a tokenizer.json. Raises EncoderError."""
    if name_or_path in ALIASES:
        return encoder(ALIASES[name_or_path])
    return Encoder(_tiktoken(name_or_path) if name_or_path in PATTERNS else _hugging_face(_find(name_or_path)))


def _tiktoken(name: str) -> Callable[[str], bytes]:
    """tiktoken's own buffer of ids, without a number object for each: 52 us for 2 KB where a list takes 61, and all of
    it without the GIL. That way through looks for special tokens, but knows of one only, and may not take it for such.
    """
    table = ranks.load(name)
    special = {_UNSAID: len(table)}
    encoding = tiktoken.Encoding(name, pat_str=PATTERNS[name], mergeable_ranks=table, special_tokens=special)
    table.clear()  # tiktoken works on a copy of its own; this one is 13 MB for o200k_base
    encode, nothing = encoding._core_bpe.encode_to_tiktoken_buffer, set[str]()

    def pack(text: str) -> bytes:
        return bytes(encode(text, nothing))

    return pack


def _hugging_face(path: Path) -> Callable[[str], bytes]:
    """Special tokens written out in the text are read as such: the engine does the same."""
    tokenizer = _read(path)
    tokenizer.no_truncation()  # the file may carry the settings of its training run
    tokenizer.no_padding()

    def pack(text: str) -> bytes:
        return array("I", tokenizer.encode(text, add_special_tokens=False).ids).tobytes()

    return pack


def _find(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        known = ", ".join([*PATTERNS, *ALIASES])
        raise EncoderError(f"tokenizer '{name_or_path}': no such file, and not one of {known}")
    return path


def _read(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise EncoderError(f"tokenizer '{path}' needs a package: pip install 'firsttoken[tokenizers]'") from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself, never a subclass
        raise EncoderError(f"tokenizer '{path}' is not a tokenizer.json: {error}") from error
