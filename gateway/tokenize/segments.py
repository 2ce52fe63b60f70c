"""A long text in segments, cut where no token crosses.

A segment is what gets tokenised, and cached, at a time. Rules:
- Where a text is cut depends only on what stands before the cut: a text that grows keeps its segments,
  all but the last.
- A cut is made before a space that follows a visible character, or after a line end that visible text
  follows. The split patterns of o200k_base and cl100k_base end a piece there in any case, so counting by
  segments is exact (but for punctuation, line end and `/` in a row, which o200k_base joins).
- A text without such a place is cut all the same: one or two tokens in 4096 characters may be off.
  Unbounded runs are not harmless: tiktoken needs 0.35 s for a megabyte of one letter, and a million
  spaces overflow the stack of its regular expression engine.
- A tokenizer.json that puts a blank before every text (SentencePiece) counts one token more per segment.
"""

from __future__ import annotations

import re

TARGET = 2048  # characters: 90 us to encode, 0.6 us to find again
LONGEST = 4096  # characters

_CUT = re.compile(r"\S(?= )|\n(?=[^\s/])")


def segments(text: str) -> list[str]:
    """The text in order; joined, the segments are the text. The empty text is one segment."""
    size = len(text)
    if size <= TARGET:
        return [text]
    parts, start = [], 0
    while size - start > TARGET:
        cut = _CUT.search(text, start + TARGET, start + LONGEST)
        end = cut.end() if cut else min(start + LONGEST, size)
        parts.append(text[start:end])
        start = end
    if start < size:
        parts.append(text[start:])
    return parts
