"""LiteLLM's fallbacks, by the cause for which it asks another group, and the tiers that say the same here.

Rules:
- A list of `router_settings` goes before the one of `litellm_settings`; the two are not joined.
- `fallbacks` are for every failure. Where there is a list for a cause of its own (the context window, the content
  policy), it alone counts for that cause, for groups outside of the list too: these have no fallback for it.
- A group that is asked as a fallback has its own fallbacks, before the next one of the first list.
- `order` divides a group: a higher one is asked after a failure of the lower ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.cli.importing.imported_config import KeyAccount
from gateway.config.config_errors import Path

CAUSES = {
    "fallbacks": "failure",
    "context_window_fallbacks": "context",
    "content_policy_fallbacks": "content_filter",
}
SECTIONS = ("router_settings", "litellm_settings")
UNKNOWN_NAME = "there is no route of this name"

Level = list[tuple[str, float]]  # pools of one tier, with weights


class Fallbacks:
    """The lists of a file."""

    def __init__(self, document: Mapping[str, Any], account: KeyAccount) -> None:
        self._account = account
        self._lists: dict[str, dict[str, list[tuple[str, Path]]]] = {}  # targets and their places, by cause and group
        for key, cause in CAUSES.items():
            found = self._setting(document, key)
            if found is not None and isinstance(found[0], list) and found[0]:
                self._lists[cause] = dict(_rules(*found))
        self._add_defaults(self._setting(document, "default_fallbacks"))

    def _setting(self, document: Mapping[str, Any], key: str) -> tuple[Any, Path] | None:
        """The list of fallbacks in force under `key`, and the path to the list."""
        found = [
            (settings[key], (section, key))
            for section in SECTIONS
            if isinstance(settings := document.get(section), dict) and settings.get(key)
        ]
        for _, path in found[1:]:
            self._account.dropped(path, "the list of router_settings goes before this one")
        return found[0] if found else None

    def _add_defaults(self, found: tuple[Any, Path] | None) -> None:
        if found is not None and isinstance(found[0], list):
            rules = self._lists.setdefault("failure", {})
            rules.setdefault("*", list(_targets(*found)))

    def has_list(self, cause: str) -> bool:
        return cause in self._lists

    def chain(self, group: str, cause: str) -> list[str]:
        """Groups that are asked one after the other once the group has failed for the cause."""
        found: list[str] = []

        def visit(failed: str) -> None:
            for target, _ in self._after(failed, cause):
                if target != group and target not in found:
                    found.append(target)
                    visit(target)

        visit(group)
        return found

    def _after(self, group: str, cause: str) -> list[tuple[str, Path]]:
        rules = self._lists.get(cause, {})
        return rules.get(group) or rules.get("*") or []

    def account_for(self, routes: Mapping[str, str]) -> None:
        """`routes`: by group."""
        for rules in self._lists.values():
            for group, targets in rules.items():
                for target, path in targets:
                    route = "*" if group == "*" else routes.get(group)
                    if route is None:
                        self._account.dropped(path, f"{group}: {UNKNOWN_NAME}")
                    elif target not in routes:
                        self._account.dropped(path, f"{target}: {UNKNOWN_NAME}")
                    else:
                        self._account.moved(path, "routes", route, "tiers")

    def targets(self) -> Iterator[str]:
        """Every group that is asked after another."""
        for rules in self._lists.values():
            for targets in rules.values():
                yield from (target for target, _ in targets)


def _rules(listed: list[Any], path: Path) -> Iterator[tuple[str, list[tuple[str, Path]]]]:
    for at, rule in enumerate(listed):
        for group, targets in rule.items() if isinstance(rule, dict) else ():
            where = (*path, at, str(group))
            yield (
                str(group),
                list(_targets(targets, where) if isinstance(targets, list) else _targets([targets], where)),
            )


def _targets(listed: list[Any], path: Path) -> Iterator[tuple[str, Path]]:
    for at, target in enumerate(listed):
        name = target.get("model") if isinstance(target, dict) else target
        yield str(name), (*path, at)


@dataclass(slots=True)
class TierPlan:
    """The tiers of a route that is being put together."""

    tiers: dict[str, TierDraft] = field(default_factory=dict)  # by pool

    def add(self, level: Level, cause: str = "") -> None:
        """Pools that are equals, asked at once or for a cause. A pool that is there already is asked for this too."""
        new = {pool: weight for pool, weight in level if pool not in self.tiers}
        for pool, _ in level:
            if cause and pool not in new and self.tiers[pool].after:
                self.tiers[pool].after.add(cause)
        least = min(new.values(), default=1.0)
        for at, (pool, weight) in enumerate(new.items()):
            self.tiers[pool] = TierDraft(pool, {cause} if cause else set(), at > 0, weight / least if new else 1.0)

    def sections(self) -> list[Any]:
        """As written under `tiers`."""
        drafts = list(self.tiers.values())
        for before, draft in zip([None, *drafts], drafts, strict=False):
            draft.beside = draft.beside and before is not None and before.after == draft.after
        follows = [*(draft.beside for draft in drafts[1:]), False]
        return [draft.section(each) for draft, each in zip(drafts, follows, strict=True)]

    @property
    def levels(self) -> int:
        return sum(not draft.beside for draft in self.tiers.values())


@dataclass(slots=True)
class TierDraft:
    """A pool of a route. `after`: the causes for which it is asked; none: at once."""

    pool: str
    after: set[str]
    beside: bool
    weight: float

    def section(self, is_followed: bool) -> Any:
        """`is_followed`: by an equal."""
        found: dict[str, Any] = {"pool": self.pool}
        if self.after:
            found["after"] = sorted(self.after) if len(self.after) > 1 else min(self.after)
        if self.beside:
            found["beside"] = True
        if (self.beside or is_followed) and self.weight != 1:
            found["weight"] = float(f"{self.weight:.4g}")
        return found if len(found) > 1 else self.pool
