"""Which slot of the shared memory is whose endpoint's: agreed upon by workers that take a configuration each by itself.

Rules:
- A slot is held by a worker, with the name that it stands for. It is free once nobody holds it.
- Who needs a slot locks the table, looks for the name, and else takes a free one: the one that has been free the
  longest, so that what is left of its last endpoint is old.
- Names are their digests: 64 bits, which no fleet is large enough to confuse.
"""

from __future__ import annotations

import fcntl
import mmap
from collections.abc import Iterable
from hashlib import blake2b
from tempfile import TemporaryFile


class SlotTable:
    """To be made before the processes are forked that share it."""

    def __init__(self, slots: int, workers: int) -> None:
        self._slots, self._workers = slots, workers
        self._cells = memoryview(mmap.mmap(-1, 8 * max((workers + 2) * slots + 1, 1))).cast("Q")
        # By slot: its name, then when it was taken; by worker and slot: whether it holds it; at the end a clock.
        self._lock = TemporaryFile()  # noqa: SIM115 - for as long as we live

    def take(self, worker: int, names: Iterable[str]) -> dict[str, int]:
        """This worker holds slots for these, and for no others, from now on. Those that found none are left out."""
        wanted = {_digest(name): name for name in names}
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            known = self._release(worker, wanted)
            left = {*range(self._slots)} - {*known.values()}
            free = sorted((at for at in sorted(left) if not self._held(at)), key=self._taken_at)
            new = [digest for digest in wanted if digest not in known]
            for at, digest in zip(free, new, strict=False):
                self._cells[at], known[digest] = digest, at
            for at in known.values():
                self._hold(worker, at)
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)
        return {wanted[digest]: at for digest, at in known.items()}

    def _release(self, worker: int, wanted: Iterable[int]) -> dict[int, int]:
        """What it held; the slots that stand for what it wants."""
        cells, first = self._cells, self._of(worker)
        cells[first : first + self._slots] = memoryview(bytes(8 * self._slots)).cast("Q")
        by_name = {cells[at]: at for at in range(self._slots) if cells[at]}
        return {digest: by_name[digest] for digest in wanted if digest in by_name}

    def _hold(self, worker: int, at: int) -> None:
        clock = self._cells[-1] = self._cells[-1] + 1
        self._cells[self._of(worker) + at] = 1
        self._cells[self._slots + at] = clock

    def _held(self, at: int) -> bool:
        return any(self._cells[self._of(worker) + at] for worker in range(self._workers))

    def _taken_at(self, at: int) -> int:
        return self._cells[self._slots + at]

    def _of(self, worker: int) -> int:
        return (2 + worker) * self._slots


def _digest(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") or 1


def tag(at: int, name: str) -> int:
    """32 bits, half of which are the name's: a slot may have had another endpoint when a prompt was noted."""
    return at & 0xFFFF | (_digest(name) & 0xFFFF) << 16
