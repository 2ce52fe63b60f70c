"""A program in a pseudo-terminal."""

from __future__ import annotations

import io
import os

TERMINAL = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"}


def until(shown: io.FileIO, mark: bytes) -> bytes:
    output = b""
    while mark not in output:
        output += shown.read(4096)
    return output
