"""Incidents: slow and failed requests grouped by route and culprit, failures first, the culprit before its victims.

Rules:
- Misses of one route with one culprit are one incident; without a culprit, those with one cause.
- An incident takes cause, evidence and mend from the misses that saw it themselves, failures before late answers.
- Misses that a caller brought upon itself are told after those that others suffered.
- Misses of a caller whose work delays others belong to the incident that names the caller: they are no second one.
- Grouping what is grouped already changes nothing, so incidents of several workers are grouped once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from policies.diagnosis.causes import GLOSSES, Cause, CauseVerdict

SUFFERED = 0.05  # share of misses that are not their caller's own doing, from which these are told first


@dataclass(frozen=True, slots=True)
class IncidentGroup:
    """`failed`, `late`: requests; `own`: how many of them are of the culprit itself. `over`: s over budgets, of failed
    requests their whole time. `since`, `last`: Unix times at which the first and the latest ended. `request_id`: of
    the request with this evidence. `caller`: the caller, where its own work is the reason."""

    route: str
    cause: str
    culprit: str
    failed: int
    late: int
    over: float
    since: float
    last: float
    evidence: str
    mend: str
    request_id: str
    caller: str = ""
    own: int = 0
    witnessed: bool = True

    @classmethod
    def of(cls, route: str, verdict: CauseVerdict, at: float, request_id: str) -> IncidentGroup:
        """A single miss that ended at `at`."""
        failed, cause = int(verdict.failed), verdict.cause.value
        found = (verdict.evidence, verdict.mend, request_id, verdict.own, 0, verdict.witnessed)
        return cls(route, cause, verdict.culprit, failed, 1 - failed, verdict.over, at, at, *found)

    @property
    def requests(self) -> int:
        return self.failed + self.late


def incidents(found: Iterable[IncidentGroup]) -> list[IncidentGroup]:
    """The incidents in which misses, or incidents of several places, come together: the worst first."""
    found = list(found)
    noisy = {each.culprit: each.route for each in found if each.cause == Cause.NOISY_NEIGHBOUR}
    groups: dict[tuple[str, str], IncidentGroup] = {}
    for each in found:
        key = each.route, each.culprit or each.cause
        if each.caller in noisy:
            key, each = (noisy[each.caller], each.caller), replace(each, own=each.requests, witnessed=False)
        groups[key] = joined(groups[key], each) if key in groups else each
    return _ordered([*groups.values()])


def joined(one: IncidentGroup, other: IncidentGroup) -> IncidentGroup:
    """Both as one incident, which tells the cause of the better witness."""
    leading = max((one, other), key=_weight)
    return replace(
        leading,
        failed=one.failed + other.failed,
        late=one.late + other.late,
        own=one.own + other.own,
        over=one.over + other.over,
        since=min(one.since, other.since),
        last=max(one.last, other.last),
    )


def headline(incident: IncidentGroup, requests: int) -> str:
    """The incident in a sentence. `requests`: of its route, in the same time."""
    counts = [f"{number} {kind}" for number, kind in ((incident.failed, "failed"), (incident.late, "late")) if number]
    of = f" of {max(requests, incident.requests)} requests"
    own = f" ({incident.own} of its own)" if incident.own else ""
    return f"{' and '.join(counts)}{of}: {incident.culprit or incident.cause}{own}"


def as_json(incident: IncidentGroup, requests: Mapping[str, int]) -> dict[str, Any]:
    shown = asdict(incident)
    shown["over_ms"] = round(shown.pop("over") * 1e3, 1)
    gloss = GLOSSES.get(incident.cause, incident.cause)
    return {"headline": headline(incident, requests.get(incident.route, 0)), "gloss": gloss, **shown}


def from_json(shown: Mapping[str, Any]) -> IncidentGroup:
    members = {name: value for name, value in shown.items() if name not in ("headline", "gloss", "over_ms")}
    return IncidentGroup(**members, over=shown["over_ms"] / 1e3)


def _weight(incident: IncidentGroup) -> tuple[bool, bool, float]:
    return incident.witnessed, incident.failed > 0, incident.last


def _ordered(found: list[IncidentGroup]) -> list[IncidentGroup]:
    """Failures first, then by the time over. Misses that callers brought upon themselves come after those that others
    suffered, unless these are next to nothing."""
    suffered = sum(each.requests for each in found if not each.caller)
    own_last = suffered >= SUFFERED * sum(each.requests for each in found)
    return sorted(found, key=lambda each: (each.failed == 0, own_last and each.caller != "", -each.failed, -each.over))
