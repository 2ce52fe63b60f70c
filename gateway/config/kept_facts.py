"""Refreshed fact files of `state.dir`, read at start, at a reload and by commands.

A start never fails because of one: a file that cannot be read or used is left whole, and the shipped facts hold. The
reason is logged, and told by `check` and `facts show`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from backends.facts import refreshed
from backends.facts.fact_checks import LARGEST, BadFacts, OldFacts
from gateway.files import NotAFile, read_regular

log = logging.getLogger("firsttoken")
_left: list[str] = []


def use_kept(directory: str | Path | None) -> None:
    """Bring the files of a state directory into use. None: the shipped files alone."""
    paths = {} if directory is None else {file: refreshed.path_of(directory, file) for file in refreshed.FILES}
    texts, left = dict[str, bytes](), dict[str, BadFacts]()
    for file, path in paths.items():
        try:
            if (text := read_regular(path, LARGEST)) is not None:
                texts[file] = text
        except (OSError, NotAFile, ValueError) as error:
            left[file] = BadFacts(getattr(error, "strerror", None) or str(error))
    left |= refreshed.use(texts)
    _left.clear()
    for file, reason in left.items():
        _left.append(f"the shipped facts hold: {paths[file]}: {reason}")
        log.log(logging.INFO if isinstance(reason, OldFacts) else logging.WARNING, _left[-1])


def left_files() -> tuple[str, ...]:
    """A line for each file that is there and not in use, with the reason."""
    return tuple(_left)
