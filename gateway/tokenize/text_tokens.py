"""Estimates the tokens of text that nobody has counted, by the learned tokens per byte of the caller's own texts.

Rules:
- Tokens are a sum over classes of bytes: letters, capitals, digits, line ends, spaces, punctuation, and the first bytes
  of characters of two and of more bytes. Weights begin as fitted on prose, code, JSON, logs and 13 languages
  (o200k_base), and are learned by recursive least squares from texts of the caller that were counted afterwards.
- A segment has a kind: `script` (not Latin), `dense` (hardly a space: base64, hexadecimal, minified) or `text`. Weights
  are of a key, a tokenizer and a kind: no key's texts change the estimates of another, no base64 those of prose.
- An estimate has a margin: MARGIN mean errors of such segments. A token has at least one byte.
"""

from __future__ import annotations

from enum import Enum
from operator import mul
from threading import Lock

from gateway.caches import GenerationalCache
from policies.latency.online_learning import Regression

MARGIN = 3.0  # mean errors: nine of ten prompts are within half of it
FIRST_ERROR = 0.25  # mean error of a segment, before any was counted
ERROR_WEIGHT = 1 / 32  # of the latest segment in the mean
STEP, SAMPLED = 5, 2000  # every fifth byte is looked at, of longer segments; no character has five bytes
SCRIPT = 0.1  # share of bytes that begin a character of several bytes
CLASSES = 8
DENSE = 0.04  # share of spaces and line ends
OWN_VARIANCE, COMMON_VARIANCE, NOISE, FLOOR = 0.1, 0.05, 0.05, 0.05  # of the weights, relative to the fitted ones
CLIP = 1.0  # largest relative error that a segment teaches
MODELS = 500  # keys, tokenizers and kinds, at least


class TextKind(Enum):
    TEXT = "text"
    DENSE = "dense"
    SCRIPT = "script"


_WEIGHTS = {  # tokens, by class: letters, capitals, digits, line ends, spaces, punctuation, two bytes, more
    TextKind.TEXT: (0.256, 0.163, 0.733, 0.375, 0.02, 0.558, 1.124, 0.614),
    TextKind.DENSE: (0.617, 0.804, 0.539, 0.6, 0.1, 0.636, 0.5, 0.8),
    TextKind.SCRIPT: (0.2, 0.3, 0.7, 0.6, 0.05, 0.6, 0.2, 0.6),
}


def _class(byte: int) -> str:
    """`~`: a byte within a character, counted by its first one."""
    if byte >= 0x80:
        return "~" if byte < 0xC0 else "2" if byte < 0xE0 else "3"
    character = chr(byte)
    if character.isalpha():
        return "a" if character.islower() else "A"
    return "0" if character.isdigit() else "\n" if character in "\r\n" else " " if character in " \t" else "."


_CLASS = "".join(map(_class, range(256))).encode()


class TextShape:
    """The kind of a segment, and the tokens that the fitted weights give to each class of its bytes."""

    __slots__ = ("features", "kind", "size")

    def __init__(self, text: bytes) -> None:
        """`text`: not empty."""
        self.size = len(text)
        sample = text[::STEP] if self.size > SAMPLED else text
        count = sample.translate(_CLASS).count
        capitals, digits, lines = count(b"A"), count(b"0"), count(b"\n")
        spaces, signs = count(b" "), count(b".")
        letters, two, more = len(sample) - capitals - digits - lines - spaces - signs, 0, 0
        if not sample.isascii():
            two, more = count(b"2"), count(b"3")
            letters -= two + more + count(b"~")
        if two + more > SCRIPT * len(sample):
            self.kind = _SCRIPT
        else:
            self.kind = _DENSE if spaces + lines < DENSE * len(sample) else _TEXT
        weights = _SAMPLED_WEIGHTS[self.kind] if sample is not text else _WEIGHTS[self.kind]
        self.features = tuple(map(mul, (letters, capitals, digits, lines, spaces, signs, two, more), weights))


_TEXT, _DENSE, _SCRIPT = TextKind.TEXT, TextKind.DENSE, TextKind.SCRIPT  # members are slow to look up
_SAMPLED_WEIGHTS = {kind: tuple(STEP * weight for weight in weights) for kind, weights in _WEIGHTS.items()}


class TextModel:
    """The learned weights of a kind of text, and their error."""

    def __init__(self) -> None:
        self._weights = Regression([OWN_VARIANCE] * CLASSES, COMMON_VARIANCE, NOISE, FLOOR)
        self.segments = 0  # learned from
        self.error = FIRST_ERROR  # mean, relative

    def tokens(self, shape: TextShape) -> float:
        return min(max(self._weights.predict(shape.features), 1.0), shape.size)

    def learn(self, shape: TextShape, tokens: int) -> None:
        error = abs(self.tokens(shape) / tokens - 1.0)
        self.segments += 1
        self.error += (min(error, CLIP) - self.error) * max(1 / (self.segments + 1), ERROR_WEIGHT)
        self._weights.update(shape.features, tokens, CLIP)


class TextModels:
    """The models of all keys; the least recently used go first. Learning is safe for several threads."""

    def __init__(self) -> None:
        self._models: GenerationalCache[TextModel] = GenerationalCache(2 * MODELS)
        self._lock = Lock()

    def estimate(self, key: str, tokenizer: str, shape: TextShape) -> tuple[float, float]:
        """Tokens of a segment, and their margin."""
        model = self._models.get(hash((key, tokenizer, shape.kind))) or _UNTAUGHT
        tokens = model.tokens(shape)
        return tokens, min(MARGIN * model.error, 1.0) * tokens

    def learn(self, key: str, tokenizer: str, shape: TextShape, tokens: int) -> None:
        """A segment was counted."""
        name = hash((key, tokenizer, shape.kind))
        with self._lock:
            if (model := self._models.get(name)) is None:
                self._models.put(name, model := TextModel())
            model.learn(shape, max(tokens, 1))


_UNTAUGHT = TextModel()
