"""The terminal of a command: can its user be asked?

A command that was started with `&` has the terminal of its shell. The first read of it, or a change of its mode, stops
the process (SIGTTIN, SIGTTOU) without a word.
"""

from __future__ import annotations

import os
import sys


def has_keyboard() -> bool:
    """True where typed keys reach this process: it is in the foreground of the terminal on standard input."""
    if not sys.stdin.isatty():
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # not the terminal of this session, which stops nobody
        return True


def may_ask() -> bool:
    """A question is seen, and can be answered."""
    return has_keyboard() and sys.stdout.isatty()
