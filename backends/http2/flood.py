"""Bounds of frames that cost a server more than their sender."""

from __future__ import annotations

from enum import Enum

PERIOD = 10.0  # s


class Flood(Enum):
    """Kinds of frames that are counted.

    RESETS: streams given up by the peer before any answer (rapid reset, CVE-2023-44487), and streams reset for an error
    of the peer (CVE-2025-8671). SETTINGS: each changes the windows of all streams (CVE-2019-9515). EMPTY: PING,
    PRIORITY, DATA without content (CVE-2019-9512, -9513, -9518), and frames of unknown types.
    """

    RESETS = "resets"
    SETTINGS = "SETTINGS"
    EMPTY = "empty frames"


LIMITS = {Flood.RESETS: 5_000, Flood.SETTINGS: 100, Flood.EMPTY: 10_000}  # within PERIOD


class FloodMeter:
    """A leaky bucket for each kind: its memory does not grow with the count."""

    def __init__(self) -> None:
        self._levels = dict.fromkeys(Flood, (0.0, 0.0))  # level, and the time of it

    def add(self, kind: Flood, now: float) -> bool:
        """True: more frames of this kind came than may."""
        limit, (level, since) = LIMITS[kind], self._levels[kind]
        level = max(level - (now - since) * limit / PERIOD, 0.0) + 1.0
        self._levels[kind] = level, now
        return level > limit
