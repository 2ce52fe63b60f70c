"""Prompts as users send them: prose and code from a vocabulary of thousands of words, seeded and never repeated.

`words.txt` holds the words of this project's pages and docstrings, the most frequent first; a word is drawn by Zipf's
law. Names, numbers and identifiers are made up on the way, as real texts have words which occur once. The text costs a
tokenizer as much as this project's own pages and sources do (o200k_base: 3.6 to 4.4 characters a token); text of few
words costs half, since encoders and their caches know all of it after a moment.
"""

from __future__ import annotations

from itertools import accumulate, count
from pathlib import Path
from random import Random

WORDS = (Path(__file__).parent / "words.txt").read_text().split()
WEIGHTS = list(accumulate(1 / (rank + 2.7) for rank in range(len(WORDS))))  # Zipf's law, in Mandelbrot's form
SENTENCE = 16  # words, on average 10
PROSE = 4  # paragraphs for one of code
CODE = (
    "    def {0}_{1}(self, {2}: int, {3}: str = '{4}') -> {5}:",
    "        if {0}.{1} is None or {2}[{n}] >= {3}_{4}:",
    "            return {0}.{1}({2}, {3}={n})  # {4} {5}",
    "        self.{0}_{1} = [{2} for {2} in {3} if {2}.{4} != '{5}']",
    '            raise ValueError(f"{0} {1} {2}: {{{3}!r}}")',
    "        await {0}.{1}_{2}({n}, {3}({4}={5}))",
)
_seeds = count(1)


class Writer:
    """Writes texts, the same for the same seed."""

    def __init__(self, seed: int | str) -> None:
        self.random = Random(seed)
        self.drawn: list[str] = []

    def text(self, size: int) -> str:
        """Exactly so many characters, all of them ASCII."""
        parts, length = [f"Case {self.random.getrandbits(60):015x}.\n\n"], 0
        while length < size:
            parts.append(self.code() if self.below(PROSE + 1) == 0 else self.paragraph())
            length += len(parts[-1])
        return "".join(parts)[:size]

    def paragraph(self) -> str:
        return " ".join([self.sentence() for _ in range(2 + self.below(5))]) + "\n\n"

    def sentence(self) -> str:
        words = self.words(4 + self.below(SENTENCE - 3))
        words[0] = words[0].capitalize()
        words[2] += (",", f" {self.below(10_000)}", f" {self.name()}", "")[self.below(4)]
        return " ".join(words) + "."

    def code(self) -> str:
        lines = [
            CODE[self.below(len(CODE))].format(*self.words(6), n=self.below(500)) for _ in range(3 + self.below(6))
        ]
        return "```python\n" + "\n".join(lines) + "\n```\n\n"

    def name(self) -> str:
        """A name that hardly any other text has."""
        return "".join([word[:4].capitalize() for word in self.words(2)]) + str(self.below(100))

    def below(self, limit: int) -> int:
        return int(self.random.random() * limit)

    def words(self, number: int) -> list[str]:
        if len(self.drawn) < number:
            self.drawn = self.random.choices(WORDS, cum_weights=WEIGHTS, k=200)
        taken, self.drawn = self.drawn[:number], self.drawn[number:]
        return taken


def text(size: int) -> str:
    """A text of `size` characters, never used before in this process."""
    return Writer(next(_seeds)).text(size)
