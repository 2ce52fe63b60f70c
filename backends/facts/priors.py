"""Prior of an API's first token: seconds for a short prompt, by class of effort, until the API has answered.

The prior decides which tiers a new gateway tries, and when a silent API is abandoned. Figures are the section `priors`
and the column `ttft` of models.yaml. If a model's row has no figure, the default effort decides: a model with hidden
reasoning by default sends the first token after all reasoning. A model of an unknown name counts as small, to be tried
and measured.

Sources of the figures, medians of short prompts:
- hourly probes through OpenRouter (jonathanwrede.de, TTFT varies 13x across LLM providers, 2026);
- five APIs, nine calls each (kunalganglani.com, LLM API latency benchmarks 2026);
- a table without its method (aiyd.com, AI model speed benchmark, 2026).
Published figures for a model differ by up to four times: a figure here is about their middle. Guesses are marked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from backends.facts.fact_rows import PriorRules, prior_rules
from backends.facts.lookup import facts_of, model_row, plain
from backends.facts.model_facts import Facts

UNNAMED = "medium"  # assumed default effort of a reasoning model


@lru_cache(maxsize=4096)
def prior_ttft(api: str, model: str) -> Mapping[str, float]:
    """By class of effort; `""`: of all others. `api`: a row of apis.yaml."""
    rules, row, facts = prior_rules(), model_row(api, model), facts_of(api, model)
    alone = _seconds(rules, api, plain(model), facts.size)
    hidden = rules.hidden.get(row.family) if row is not None and _reasons(facts) else None
    by_effort = {"": alone} if hidden is None else _hidden(hidden, alone, facts)
    return {**by_effort, **_own(facts)}


def _reasons(facts: Facts) -> bool:
    return facts.thinks_unasked or bool(facts.efforts)


def _hidden(hidden: Mapping[str, float], alone: float, facts: Facts) -> dict[str, float]:
    by_effort = {"none": alone} | {effort: max(alone, seconds) for effort, seconds in hidden.items()}
    unasked = (facts.default_effort or UNNAMED) if facts.thinks_unasked else "none"
    return {**by_effort, "": by_effort.get(unasked, by_effort[UNNAMED])}


def _own(facts: Facts) -> Mapping[str, float]:
    """Figures of the row; the one of the default effort holds where no effort is asked for."""
    own = facts.ttft or {}
    return {"": own[facts.default_effort], **own} if facts.default_effort in own else own


def _seconds(rules: PriorRules, api: str, name: str, size: float | None) -> float:
    small, large = rules.seconds.get(api, rules.seconds["other"])
    is_large = _sounds_large(rules, name) if size is None else size >= rules.large_from
    return large if is_large else small


def _sounds_large(rules: PriorRules, name: str) -> bool:
    names = rules.names
    if re.search(names["shows"], name):
        return True
    return re.search(names["large"], name) is not None and re.search(names["small"], name) is None
