"""The latest prompts, to find the one that a prompt continues or departs from.

A prompt is known by its landmarks: chained hashes at equal distances, so that equal hashes mean equal beginnings.
Noting a prompt is O(1), and both indexes are bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from policies.diagnosis.facts import EarlierPrompt
from policies.prefix_doctor.lineage import shared_blocks
from policies.types import NEVER

PROMPTS = 2048  # kept in each index


class SentPrompt(NamedTuple):
    """`tokens`: of the whole prompt; `session`: of its caller, 0: none is named."""

    tokens: int
    landmarks: Sequence[int]
    endpoint: str
    session: int
    at: float


class PromptTrail:
    """Prompts by their last landmark, and by session."""

    def __init__(self) -> None:
        self._by_end: OrderedDict[int, SentPrompt] = OrderedDict()
        self._by_session: OrderedDict[int, SentPrompt] = OrderedDict()

    def note(self, prompt: SentPrompt) -> None:
        """A prompt without landmarks is too short to matter."""
        if prompt.landmarks:
            _put(self._by_end, prompt.landmarks[-1], prompt)
            if prompt.session:
                _put(self._by_session, prompt.session, prompt)

    def earlier(self, prompt: SentPrompt, lost_at: Mapping[str, float]) -> EarlierPrompt | None:
        """The longest known prompt that this one continues, or the last of its session, whichever is longer.
        `lost_at`: when endpoints lost their caches."""
        continued = next((self._by_end[mark] for mark in reversed(prompt.landmarks) if mark in self._by_end), None)
        last = self._by_session.get(prompt.session)
        known = [each for each in (continued, last) if each is not None]
        if not known:
            return None
        found = max(known, key=lambda each: len(each.landmarks))
        return EarlierPrompt(
            found.endpoint,
            found.tokens,
            found.tokens * shared_blocks(found.landmarks, prompt.landmarks) // len(found.landmarks),
            prompt.at - found.at,
            lost_at.get(found.endpoint, NEVER) > found.at,
        )


def _put(index: OrderedDict[int, SentPrompt], key: int, prompt: SentPrompt) -> None:
    index[key] = prompt
    index.move_to_end(key)
    if len(index) > PROMPTS:
        index.popitem(last=False)
