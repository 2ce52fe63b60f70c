"""Problems of a configuration, and their one-line form.

Rules:
- One line per problem: location, error, fix. A stage reports all its problems.
- A value from the environment is never shown, only the `${NAME}` in the file.
- A literal key or password is not shown either, nor a text as long as a key that YAML read as an alias, a tag or a
  reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

Path = tuple[str | int, ...]

SECRET_LENGTH = 8  # characters: no key is shorter
_PLAIN = re.compile(r"[A-Za-z0-9_/-]+")


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of a file; line 0 is the file as a whole."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Problem:
    """`text` describes the error of the value at `path`."""

    path: Path
    text: str

    def at(self, place: SourceLocation) -> str:
        return f"{place}: {dotted(self.path)}: {self.text}" if self.path else f"{place}: {self.text}"


class ConfigError(Exception):
    """The configuration cannot be used; `problems` are whole lines, ready to print."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def dotted(path: Path) -> str:
    """`routes.chat.tiers[1]`; a name that contains a dot is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _PLAIN.fullmatch(part) else f'"{part}"')
    return text


def quoted(text: str) -> str:
    """The value in quotes, unless its length suggests a secret."""
    return repr(text) if len(text) < SECRET_LENGTH else "what stands here"


def nearest(name: str, known: Iterable[str]) -> str:
    """Ends a sentence with the member of `known` that was probably meant, or with nothing."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Ends a sentence with the nearest member of `known`, or with all members if none is near."""
    names = list(known)
    return nearest(name, names) or (f"; known: {', '.join(names)}" if names else "")
