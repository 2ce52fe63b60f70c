"""Errors of a configuration and their format.

Rules:
- One line per problem: location, problem, remedy. All problems of a stage are reported together.
- A value from the environment is never shown, only its `${NAME}`.
- A literal key or password is not shown either, nor any YAML alias, tag or reference of the length of a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches

Path = tuple[str | int, ...]

SECRET_LENGTH = 8  # characters, the minimum of a key
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
    """A problem with the value at `path`."""

    path: Path
    text: str

    def at(self, location: SourceLocation) -> str:
        return f"{location}: {dotted(self.path)}: {self.text}" if self.path else f"{location}: {self.text}"


class ConfigError(Exception):
    """The configuration is invalid; `problems` are complete lines."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@contextmanager
def file_errors(place: object, verb: str) -> Iterator[None]:
    """Raises ConfigError for an error of the system with the file at `place`, which is to be `verb`: read, written."""
    try:
        yield
    except OSError as error:
        raise ConfigError([f"{place}: cannot be {verb}: {error.strerror}"]) from None


def dotted(path: Path) -> str:
    """`routes.chat.tiers[1]`; a name with a dot is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _PLAIN.fullmatch(part) else f'"{part}"')
    return text


def quoted(text: str) -> str:
    """Hides a text of the length of a secret."""
    return repr(text) if len(text) < SECRET_LENGTH else "(value hidden)"


def nearest(name: str, known: Iterable[str]) -> str:
    """End of a message: the most similar of `known`, or nothing."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""


def sentence(text: str) -> str:
    """The text with a full stop, unless it ends as a question."""
    return text if text.endswith("?") else f"{text}."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """End of a message: the most similar of `known`, or else all of them."""
    names = list(known)
    return nearest(name, names) or (f"; known: {', '.join(names)}" if names else "")
