"""Recognises a peer that begins an answer anew although it was given the beginning.

Servers that do not know `continue_final_message` ignore it. The peer's first words tell: they are those of the answer's
beginning. Rules, with tokens counted as events, or as six characters each where events hold several:
- Words other than the first words of the answer: the peer continues.
- The first 8 tokens of the answer, or the whole answer so far of 2 tokens or more: the peer has begun anew.
- Between 3 and 7 of these tokens and then other words, or an end: the peer has begun anew, with other words.
- Up to 2 of these tokens and then other words, or an end ("```" closes what "```" has opened): the peer continues.
- An answer that repeats its own beginning ("a a a a") may go on in these words: what the rules above call begun anew
  is then unclear, and other words after them are a continuation.
- A single token repeated as a whole is unclear, and so is an end by the limit of tokens in the midst of these words.
- Unclear texts are never joined: an explicit error is better than doubled text.
"""

from __future__ import annotations

from enum import Enum, auto

SURE = 8  # tokens equal to the answer's beginning: no coincidence
CHANCE = 2  # tokens that may be equal by chance
CHARACTERS = 6  # of a token, where events hold several: rather too many


class Opening(Enum):
    """Meaning of a peer's first words."""

    OPEN = auto()  # more words are needed
    CONTINUES = auto()
    RESTARTS = auto()
    RESTARTS_OTHERWISE = auto()  # anew, with other words
    UNCLEAR = auto()


class RestartDetector:
    """Compares a peer's first words with those of the answer. `tokens`: of the answer's text."""

    def __init__(self, text: str, tokens: int) -> None:
        self._known = text
        self._known_tokens = max(tokens, len(text) // CHARACTERS)
        self._heard = ""
        self._equal = 0  # events equal to the answer's beginning

    def hear(self, text: str, finish: str | None) -> Opening:
        """Read an event of the peer: its text and its finish_reason."""
        self._heard += text
        same = common_length(self._heard, self._known)
        if same == len(self._heard) <= len(self._known):
            self._equal += bool(text)
        tokens = max(self._equal, same // CHARACTERS)
        if same == len(self._known):
            return self._judge_whole(tokens)
        if same < len(self._heard):
            return self._judge_end(tokens, same)
        if tokens >= SURE:
            return Opening.UNCLEAR if self._recurs(same) else Opening.RESTARTS
        if finish is None:
            return Opening.OPEN
        return Opening.UNCLEAR if self._heard and finish == "length" else self._judge_end(tokens, same)

    def _judge_whole(self, tokens: int) -> Opening:
        """Judge a repetition of the whole answer."""
        if self._known_tokens < 2:
            return Opening.UNCLEAR if tokens else Opening.CONTINUES
        return Opening.UNCLEAR if self._recurs(len(self._known)) else Opening.RESTARTS

    def _judge_end(self, tokens: int, same: int) -> Opening:
        """Judge `same` equal characters with something else after them."""
        if tokens <= CHANCE or self._recurs(same):
            return Opening.CONTINUES
        return Opening.RESTARTS_OTHERWISE

    def _recurs(self, same: int) -> bool:
        """The answer repeats its beginning."""
        beginning = self._known[: max(1, min(same, len(self._known) // 2))]
        return self._known.find(beginning, 1) >= 0


def common_length(one: str, other: str) -> int:
    """Characters with which both begin."""
    if one.startswith(other) or other.startswith(one):
        return min(len(one), len(other))
    pairs = zip(one, other, strict=False)
    return next(number for number, (a, b) in enumerate(pairs) if a != b)
