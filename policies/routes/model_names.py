"""Names that callers send as `model`: exact names, patterns with `*`, and the names nearest to an unknown one.

Rules:
- An exact name comes before every pattern. Among patterns the one with the most literal characters comes first; of two
  with as many, the one with fewer `*`, then the earlier one.
- In this order a pattern is reached by some name unless an equal one stands before it.
- A name of more than LONGEST characters matches no pattern. Names come from callers: every function takes time in
  proportion to the lengths of its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from heapq import nlargest

LONGEST = 256  # characters
ANY = "*"
LATEST = "latest"  # the tag that Ollama adds to a name without one
NEAR = 0.4  # least similarity of a name that is suggested
SHOWN = 3  # names that are suggested
COMPARED = 1000  # known names, at most, to compare an unknown name with


def is_pattern(name: str) -> bool:
    return ANY in name


def matches(pattern: str, name: str) -> bool:
    """`*` stands for any characters, or none."""
    first, *rest = pattern.split(ANY)
    if not rest or len(name) > LONGEST:
        return name == pattern
    *middle, last = rest
    at, end = len(first), len(name) - len(last)
    if at > end or not (name.startswith(first) and name.endswith(last)):
        return False
    for part in middle:
        if (found := name.find(part, at, end)) < 0:
            return False
        at = found + len(part)
    return True


def by_precedence(patterns: Iterable[str]) -> list[str]:
    """The pattern that is tried first comes first."""
    return sorted(patterns, key=lambda pattern: (pattern.count(ANY) - len(pattern), pattern.count(ANY)))


def own_names(models: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Model -> pool, for models of a single pool. `models`: names by pool, patterns included."""
    pools: dict[str, list[str]] = {}
    for pool, names in models.items():
        for name in names:
            pools.setdefault(name, []).append(pool)
    return {name: found[0] for name, found in pools.items() if len(found) == 1 and not is_pattern(name)}


def without_tag(model: str) -> str:
    """`llama3.2` of `llama3.2:latest`; empty: it has no tag, or several colons, as fine-tuned models of OpenAI."""
    path, slash, last = model.rpartition("/")
    name, _, tag = last.partition(":")
    return f"{path}{slash}{name}" if name and tag and ":" not in tag else ""


def by_untagged(models: Iterable[str]) -> dict[str, list[str]]:
    """Models of a server by their names without tag. Where one has the tag `latest`, it alone is meant."""
    found: dict[str, list[str]] = {}
    for model in models:
        if name := without_tag(model):
            found.setdefault(name, []).append(model)
    latest = {name: f"{name}:{LATEST}" for name in found}
    return {name: [latest[name]] if latest[name] in tagged else tagged for name, tagged in found.items()}


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Names with most pairs of letters in common, the most similar first; of equal ones the shorter, which is less
    likely to be a variant. A path before the last `/` counts for nothing, on either side."""
    wanted = _pairs(name[:LONGEST])
    compared = [
        (_similarity(wanted, _known_pairs(each)), each) for each, _ in zip(known, range(COMPARED), strict=False)
    ]
    near = [(similarity, -len(each), each) for similarity, each in compared if similarity >= NEAR]
    return [each for _, _, each in nlargest(SHOWN, near)]


@lru_cache(maxsize=2 * COMPARED)
def _known_pairs(name: str) -> frozenset[str]:
    """Of a configured name: they are compared with every unknown one."""
    return _pairs(name)


def _pairs(name: str) -> frozenset[str]:
    text = f" {name.rpartition('/')[2].lower()} "
    return frozenset(map(str.__add__, text, text[1:]))


def _similarity(one: frozenset[str], other: frozenset[str]) -> float:
    """Dice's coefficient, 0 to 1."""
    return 2 * len(one & other) / (len(one) + len(other))
