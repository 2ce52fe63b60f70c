"""Ids of requests: the caller's own where it is fit to be logged, else a new one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import count

_ID_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.:")
LONGEST = 128  # characters of a caller's own id


def request_id_of(headers: Mapping[str, str]) -> str:
    """The caller's own id if short and plain (ids are logged and returned); otherwise a new id."""
    given = headers.get("x-request-id", "")
    if given and len(given) <= LONGEST and _ID_CHARACTERS.issuperset(given):
        return given
    return new_request_id()


class RequestIds:
    """Ids unique over processes and restarts: each process, forked or not, has a random prefix."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self._prefix = f"req_{os.urandom(8).hex()}"

    def __call__(self) -> str:
        return f"{self._prefix}{next(self._numbers):08x}"


new_request_id = RequestIds()
