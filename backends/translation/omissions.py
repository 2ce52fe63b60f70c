"""Members dropped from a request in translation to another dialect: permission to drop, and notes of dropped members.

A member is left out for one of two reasons: the route drops the member by name (`drop`), or the translation knows it as
unnecessary for the same answer or nearly the same: a label, a tool that the backend cannot run (`leave_out`).
The caller is told by the header `x-firsttoken-left-out`, the operator by the Record and by
`firsttoken_left_out_total`. Names in the header may be a caller's own words; labels of the metric never are.
"""

from __future__ import annotations

import re
from collections.abc import Container

_MOST = 32  # members noted of a request: a caller may send any number of kinds
_LONGEST = 64  # characters of a name in the header
_INDEX = re.compile(r"\[\d+\]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")  # in a header


class Omissions:
    """Notes members lost in one translation of a request. `dropped`: names and paths that the route drops."""

    __slots__ = ("_dropped", "noted")

    def __init__(self, dropped: Container[str] = ()) -> None:
        self._dropped = dropped
        self.noted: dict[str, str] = {}  # label of the metric, by the name that the caller is told

    def drop(self, path: str) -> bool:
        """Note a member that the route drops by name or by path without indices. False: not dropped. `path`: may
        contain caller text, such as the type of a tool."""
        bare = _INDEX.sub("", path)
        for name in (bare, bare.rpartition(".")[2]):
            if name in self._dropped:
                self._note(bare, name)
                return True
        return False

    def drop_known(self, path: str) -> bool:
        """Drop a member that the other dialect can express: `NoRefusals` keeps the member, a route may drop it."""
        return self.drop(path)

    def leave_out(self, path: str) -> None:
        """Note a member that the translation leaves out. `path`: names of the dialect, no word of the caller."""
        bare = _INDEX.sub("", path)
        self._note(bare, bare)

    def _note(self, told: str, label: str) -> None:
        if len(self.noted) < _MOST:
            self.noted.setdefault(_UNSAFE.sub("_", told[:_LONGEST]), label)


class _Everything(Container[str]):
    def __contains__(self, member: object) -> bool:
        return True


class NoRefusals(Omissions):
    """Permits every member that the other dialect cannot express to be dropped, and no other member."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_Everything())

    def drop_known(self, path: str) -> bool:
        return False
