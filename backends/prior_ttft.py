"""Seconds to the first token of an API that has not answered yet, by its kind and the family of its model.

A prior holds until the first answers: it decides which tiers a fresh gateway tries, and when it leaves a silent API. A
model whose name tells no family counts as a small one: an API that is not asked teaches nothing.

Sources, medians of short prompts:
- hourly probes through OpenRouter (jonathanwrede.de, TTFT varies 13x across LLM providers, 2026): gemini-2.5-flash-lite
  0.32, flash 0.41, gpt-5.4 0.91, gpt-5.5 1.16, claude-opus-4.6 1.71, deepseek-v3.2 1.73, claude-sonnet-4.6 2.12,
  grok-4-fast 3.6, grok-4.3 4.2;
- five APIs, nine calls each (kunalganglani.com, LLM API latency benchmarks 2026): claude-haiku-4.5 0.60, gpt-4.1-mini
  about 2.4;
- a table without its method (aiyd.com, AI model speed benchmark, 2026): small models 0.2 to 0.3, gpt-4o, sonnet and
  mistral-large 0.5, gemini-pro 0.6, opus 0.8, o3 2 to 15.
They differ by up to four times for one model, so a figure here is about the middle of what was published. Guesses
without a source: groq (chips of its own), azure (as openai), small models of mistral and xai, all other kinds, and how
o3's 2 to 15 s divide by effort.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_OTHER = (0.4, 0.8)
_SECONDS: Mapping[str, tuple[float, float]] = {  # a small model; a large one, or one that shows its reasoning
    "openai": (0.4, 0.9),
    "azure": (0.4, 0.9),
    "anthropic": (0.6, 1.5),
    "gemini": (0.4, 0.6),
    "groq": (0.2, 0.3),
    "mistral": (0.4, 0.5),
    "deepseek": (1.7, 1.7),
    "xai": (0.8, 3.6),
}
# OpenAI's reasoning models show no reasoning in chat completions: the first token comes after all of it. By class of
# effort; a request without one is answered with medium effort.
_HIDDEN: Mapping[str, float] = {"none": 0.9, "minimal": 1.0, "low": 2.0, "medium": 4.0, "": 4.0, "high": 12.0}
_HIDES = re.compile(r"(^|/)(o[1345]|gpt-5)(-(mini|nano|pro|preview))?(-\d{4}.*)?$")
_SMALL = re.compile(r"(^|[^a-z0-9])(mini|nano|flash|haiku|lite|small|instant|tiny|1?\db)([^a-z0-9]|$)")
_LARGE = re.compile(r"(^|[^a-z0-9])(opus|sonnet|pro|large|gpt-[45]\w*|deepseek|[2-9]\db|\d{3}b)([^a-z0-9]|$)")
_SHOWS = re.compile(r"thinking|reason|magistral|qwq|grok-[34]|(^|[^a-z0-9])r1([^a-z0-9]|$)")


def prior_ttft(kind: str, model: str) -> Mapping[str, float]:
    """By class of effort; `""`: of all others. `kind`: of the backend."""
    name = model.lower()
    if _HIDES.search(name):
        return _HIDDEN
    is_large = _SHOWS.search(name) or (_LARGE.search(name) and not _SMALL.search(name))
    return {"": _SECONDS.get(kind, _OTHER)[bool(is_large)]}
