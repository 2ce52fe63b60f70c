"""Learned state of a pool: lessons between endpoints, and the comparison of an endpoint with siblings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from policies.fleet.circuit_breaker import BreakerState
from policies.fleet.endpoint_state import EndpointState
from policies.latency.token_counts import TokenScale
from policies.latency.ttft_predictor import FADE_AFTER, MATURE_SAMPLES
from policies.types import FOREVER, NEVER, TRAINED_SAMPLES, Pool

TEACHER_SAMPLES = 2  # times the learner's samples, needed by a teacher
TEACH_AGAIN = 1.25  # times the samples of the last lesson, needed for another
FADE_EVERY = 5.0  # s
OUTLIER_REFUSALS, SIBLING_SHARE = 10, 0.2  # 4xx of these; share among the siblings' answers from which it is none


@dataclass(slots=True)
class PoolState:
    """The endpoints of a pool. `learners`: members with few samples; `uncounted`: without an answer that has told how
    many tokens an event carries."""

    pool: Pool
    scale: TokenScale
    members: list[EndpointState]
    learners: list[EndpointState]
    uncounted: list[EndpointState]
    fades_at: float = NEVER

    def teach(self, teacher: EndpointState, now: float) -> list[EndpointState]:
        """`teacher` has a new sample. Returns the siblings which learned from the sample."""
        taught: list[EndpointState] = []
        if self.learners:
            self.learners = [one for one in self.learners if one.predictor.samples < MATURE_SAMPLES]
            taught = [one for one in self.learners if self._learns(one, teacher, now)]
        return taught if now < self.fades_at else [*taught, *self._fade(now)]

    def _fade(self, now: float) -> list[EndpointState]:
        """Members without a recent sample, and none to come, forget a slowness. Returns these."""
        self.fades_at = now + FADE_EVERY
        asked = {one.predictor for one in self.members if one.inflight.prefilling}
        predictors = dict.fromkeys(one.predictor for one in self.members)
        recent = [one for one in predictors if now - one.learned_at <= FADE_AFTER and one.samples >= TRAINED_SAMPLES]
        if not recent:
            return []
        typical = sorted(recent, key=lambda one: one.typical_ttft(now))[(len(recent) - 1) // 2]
        for old in predictors.keys() - asked:
            if now - old.learned_at > FADE_AFTER:
                old.fade_to(typical, now)
        return [one for one in self.members if one.predictor.is_fading]

    def _learns(self, learner: EndpointState, teacher: EndpointState, now: float) -> bool:
        if learner.predictor.is_fading:
            return False
        if learner is not teacher and teacher.predictor.samples < TEACH_AGAIN * learner.teacher_samples:
            return False
        needed = TEACHER_SAMPLES * learner.predictor.samples
        teachers = [one for one in self.members if one.predictor.samples > needed]
        if not teachers:
            return False
        nearest = min(teachers, key=lambda one: learner.predictor.distance(one.predictor, now))
        learner.predictor.warm_start_from(nearest.predictor, now)
        learner.tpot_predictor.warm_start_from(nearest.tpot_predictor)
        learner.teacher_samples = max(one.predictor.samples for one in teachers)
        return True

    def share_tokens_per_event(self, teacher: EndpointState) -> None:
        """Give the tokens per event that `teacher` has seen to endpoints without an answer of their own."""
        self.uncounted = [one for one in self.uncounted if not one.interference.counted_answers]
        for one in self.uncounted:
            one.interference.tokens_per_event = teacher.interference.tokens_per_event

    def is_outlier(self, state: EndpointState) -> bool:
        """An outlier: the endpoint alone, or the server of its ranks, refuses requests (4xx) that the rest answers:
        probably another server."""
        host = state.endpoint.host
        return self._stand_out([state]) or self._stand_out([one for one in self.members if one.endpoint.host == host])

    def _stand_out(self, suspects: list[EndpointState]) -> bool:
        answers = [refused for one in suspects for refused in one.refusals]
        others = [refused for one in self.members if one not in suspects for refused in one.refusals]
        if sum(answers) < max(OUTLIER_REFUSALS, len(answers) / 2) or len(others) < OUTLIER_REFUSALS:
            return False
        return sum(others) < SIBLING_SHARE * len(others)

    def assume_other_traffic(self) -> list[EndpointState]:
        """An engine that does not tell its load is taken to have as much other traffic as the busiest that does: not
        known is not idle. Returns the engines with another assumption than before."""
        silent = [one for one in self.members if one.load_fault]
        if not silent:
            return []
        known = [one for one in self.members if not one.load_fault]
        most = max(known, key=lambda one: one.other_running + one.other_waiting, default=None)
        others = (0, 0) if most is None else (most.other_running, most.other_waiting)
        changed = [one for one in silent if (one.other_running, one.other_waiting) != others]
        for one in changed:
            one.assume_others(*others)
        return changed

    def others_up(self, state: EndpointState) -> bool:
        return any(one.breaker.state is BreakerState.CLOSED for one in self.members if one is not state)

    def mostly_down(self) -> bool:
        return 2 * sum(one.breaker.down_since > NEVER for one in self.members) > len(self.members)

    def tpot_alone(self) -> float | None:
        """Seconds per token of an answer alone on the fastest member, at rest; None: not learned yet. Of members in
        use, or of all while none is."""
        used = [one for one in self.members if one.breaker.state is BreakerState.CLOSED] or self.members
        found = [one.tpot_predictor.tpot_alone for one in used]
        return min((alone for alone in found if alone is not None), default=None)


def share_predictors(members: Iterable[EndpointState]) -> None:
    """One model of latency for all keys of a server: else chance would prefer a key, and use up its limit first."""
    first: dict[str, EndpointState] = {}
    for member in members:
        if server := member.endpoint.server:
            other = first.setdefault(server, member)
            member.predictor, member.tpot_predictor = other.predictor, other.tpot_predictor


def without_larger_window(pools: Mapping[str, Pool], pool: str) -> frozenset[str]:
    """Pools with no room for what exceeds the context window of `pool`. An unknown window may have room."""
    window = pools[pool].context_window if pool in pools else None
    smaller = {name for name, other in pools.items() if window and (other.context_window or FOREVER) <= window}
    return frozenset(smaller | {pool})
