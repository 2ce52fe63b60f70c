"""Reasons for which a prompt took long to compute: its length, or a prefix that should have been cached."""

from __future__ import annotations

from policies.diagnosis.causes import Cause, CauseFound
from policies.diagnosis.facts import EarlierPrompt, RequestFacts, ms
from policies.diagnosis.usual import Usual

NOTICEABLE = 512  # tokens: landmarks of prompts are as far apart
MOST = 0.5  # of the tokens in question
REGULAR = 0.3  # share of a prompt from which a route is expected to find its prefix cached
LONGER, LONGEST = 1.5, 1.1  # times the usual median, and its 90th percentile


def prompt_cause(facts: RequestFacts, usual: Usual) -> CauseFound | None:
    """None: the prompt is no reason."""
    return _lost_turn(facts) or _lost_prefix(facts) or _broken(facts) or _unseen(facts, usual) or _long(facts, usual)


def _lost_turn(facts: RequestFacts) -> CauseFound | None:
    """The prompt continues an earlier one, whose blocks were computed and are gone."""
    earlier = facts.earlier
    if earlier is None or earlier.shared < earlier.tokens or earlier.tokens - facts.hit < NOTICEABLE:
        return None
    if facts.hit > MOST * earlier.tokens:
        return None
    told = (
        f"{facts.hit:,} of {facts.prompt:,} prompt tokens were cached; {earlier.tokens:,} of them were computed "
        f"{ms(earlier.ago)} ago at {earlier.endpoint}"
    )
    if earlier.endpoint != facts.endpoint:
        return CauseFound(Cause.COLD_CACHE, f"{told}, and this turn went to {facts.endpoint}")
    if earlier.lost:
        return CauseFound(Cause.COLD_CACHE, f"{told}, which was restarted or gone since")
    return CauseFound(Cause.EVICTED_SESSION, f"{told}, which has dropped them since")


def _lost_prefix(facts: RequestFacts) -> CauseFound | None:
    """The forecast counted on blocks which the engine did not have."""
    lacking = facts.predicted - facts.hit
    if facts.cached is None or lacking < NOTICEABLE or facts.hit > MOST * facts.predicted:
        return None
    told = f"{facts.predicted:,} of {facts.prompt:,} prompt tokens were expected in the cache; {facts.hit:,} were there"
    if facts.endpoint_share is not None and facts.endpoint_share < MOST:
        return CauseFound(Cause.COLD_CACHE, f"{told}, and other prompts at {facts.endpoint} missed theirs too")
    return CauseFound(Cause.EVICTED_SESSION, told)


def _broken(facts: RequestFacts) -> CauseFound | None:
    """The prompt departs early from the one before it in its session, and is no shorter."""
    earlier = facts.earlier
    if earlier is None or earlier.shared >= MOST * earlier.tokens or earlier.tokens - earlier.shared < NOTICEABLE:
        return None
    if facts.prompt < earlier.tokens or facts.hit > MOST * earlier.tokens:
        return None
    return CauseFound(Cause.CACHE_BROKEN, f"{_departs(earlier)}; {facts.hit:,} of {facts.prompt:,} tokens were cached")


def _departs(earlier: EarlierPrompt) -> str:
    where = f"after {earlier.shared:,} tokens" if earlier.shared else f"within its first {NOTICEABLE} tokens"
    return (
        f"the prompt departs {where} from the one of {earlier.tokens:,} tokens sent {ms(earlier.ago)} before it in "
        "the same session"
    )


def _unseen(facts: RequestFacts, usual: Usual) -> CauseFound | None:
    """A route whose prompts usually find a prefix, and a prompt that finds none."""
    expected = usual.predicted_share.p50 if usual.known else 0.0
    missing = expected * facts.prompt - facts.hit
    if expected < REGULAR or missing < NOTICEABLE or facts.hit > MOST * expected * facts.prompt:
        return None
    if facts.prompt > LONGER * max(usual.prompt.p90, 1.0):
        return None
    share = facts.hit / max(facts.prompt, 1)
    told = f"{share:.0%} of {facts.prompt:,} prompt tokens were cached; usual here: {expected:.0%}"
    if facts.route_share is not None and facts.route_share >= MOST * expected:
        return CauseFound(
            Cause.CACHE_BROKEN,
            f"{told}, and {facts.route_share:.0%} in the other latest prompts: this one begins differently",
        )
    return CauseFound(Cause.COLD_CACHE, f"{told}; the other latest prompts of the route found no prefix either")


def _long(facts: RequestFacts, usual: Usual) -> CauseFound | None:
    if usual.known:
        if facts.computed < max(LONGER * usual.computed.p50, LONGEST * usual.computed.p90, NOTICEABLE / 2):
            return None
        told = f"{facts.computed:,} prompt tokens to compute; usual here: {usual.computed.p50:,.0f} (p50), "
        return CauseFound(Cause.LONG_PROMPT, f"{told}{usual.computed.p90:,.0f} (p90)")
    if facts.engine.forecast_prefill < MOST * facts.stages.get("upstream", 0.0) or facts.computed < NOTICEABLE:
        return None
    alone = f"the forecast gave the prefill alone {ms(facts.engine.forecast_prefill)}"
    return CauseFound(Cause.LONG_PROMPT, f"{facts.computed:,} prompt tokens to compute; {alone}")
