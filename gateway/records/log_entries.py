"""Reads lines of the access log: into a ledger, and into a log of the same traffic with all breaks mended.

The mended log is for a replay: beside the replay of the log itself, it shows what the breaks cost.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from policies.prefix_doctor.break_class import BreakClass
from policies.prefix_doctor.lineage import Lineage, PrefixBreak
from policies.prefix_doctor.prefix_ledger import BreakCost, LedgerEntry
from policies.prompt_outline import EMPTY, PARTS, Composition

REMEMBERED = 20_000  # sessions and templates of a log, of which the last prompt is kept


def entry_of(row: Mapping[str, Any]) -> LedgerEntry | None:
    """None: the line is of a refused request, or of an older version. Raises KeyError, TypeError or ValueError."""
    if "access_log_lines_lost" in row or row.get("end") == "refused" or "composition" not in row:
        return None
    parts, broken = row["composition"], row["prefix_break"]
    cost = BreakCost() if broken is None else _cost(broken)
    return LedgerEntry(
        route=str(row["route"]),
        caller=str(row["tenant"]),
        wall=float(row["wall"]),
        composition=EMPTY if parts is None else Composition(*(int(parts[name]) for name in PARTS)),
        lineage=Lineage(kept=row["kept_tokens"], broken=None if broken is None else _break(broken)),
        cost=cost,
        repaired=[str(rule) for rule in row["repaired"]],
    )


def _break(found: Mapping[str, Any]) -> PrefixBreak:
    numbers = (int(found[name]) for name in ("at_tokens", "lost_tokens", "block"))
    return PrefixBreak(BreakClass(found["class"]), str(found["role"]), *numbers)


def _cost(found: Mapping[str, Any]) -> BreakCost:
    return BreakCost(float(found["prefill_ms"]) / 1e3, bool(found["missed_budget"]), float(found["usd"]))


def mended(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Lines of the same traffic without breaks."""
    return map(LogMender().mend, rows)


@dataclass(frozen=True, slots=True)
class ChosenBreaks:
    """Breaks of one route; empty: of all routes of the log. `cls` None: of every class."""

    route: str
    cls: BreakClass | None = None

    def includes(self, route: str, cls: str) -> bool:
        return bool(cls) and self.route in ("", route) and self.cls in (None, cls)


class LogMender:
    """Takes the lines of a log in order of time. `chosen` None: every break is mended."""

    def __init__(self, chosen: ChosenBreaks | None = None) -> None:
        self._chosen = chosen
        self._last: OrderedDict[tuple[str, str], array[int]] = OrderedDict()  # landmarks of mended prompts, by `_key`

    def mend(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The line with the `prefix` and the cached tokens of a prompt without breaks; lost tokens are those of the
        step before. Raises KeyError, TypeError or ValueError."""
        own = array("Q", b64decode(row["prefix"])) if row.get("prefix") else None
        prompt = row.get("prompt_tokens_reported") or row.get("prompt_tokens_estimated")
        if own is None or not prompt or "continues" not in row:
            return row
        lost, before = 0, self._last.get(_key(row, _LINKS.get(str(row["continues"]), "")))
        if before is not None:
            lost = self._lost(row)
            shared = before[: round((row["kept_tokens"] + lost) * len(own) / prompt)]
            own = shared + own[len(shared) :]
        self._keep(row, own)
        cached = row.get("cached_tokens_reported")
        found = None if cached is None else min(cached + lost, prompt)
        kept = row["kept_tokens"] if before is None else row["kept_tokens"] + lost
        return {**row, "prefix": b64encode(own).decode(), "cached_tokens_reported": found, "kept_tokens": kept}

    def _lost(self, row: Mapping[str, Any]) -> int:
        """Tokens behind the break of a line; 0: it has none, or none that is mended."""
        found = row["prefix_break"]
        is_mended = found is not None and (
            self._chosen is None or self._chosen.includes(str(row["route"]), str(found["class"]))
        )
        return int(found["lost_tokens"]) if is_mended else 0

    def _keep(self, row: Mapping[str, Any], landmarks: array[int]) -> None:
        for name in ("session", "template"):
            if row.get(name):
                self._last[_key(row, name)] = landmarks
                self._last.move_to_end(_key(row, name))
        while len(self._last) > REMEMBERED:
            self._last.popitem(last=False)


def _key(row: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Of a session or a template. Several callers may have one of the same name."""
    return str(row.get("tenant", "")), str(row.get(name))


_LINKS = {"conversation": "session", "template": "template"}  # member of a line by the kind of its link
