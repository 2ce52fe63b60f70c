"""Reads a refusal (400, 422) as a lesson: a change of the body, or another operation, that the server would accept.

Pure: computed from the error body and the request body. Known forms are rows of a table (`refusals.yaml`).

Rules:
- The error's own parts are read in order: `param`, places, violations, the message, then an error inside the error. The
  first row that fits a part, and whose member was sent, counts.
- A lesson removes no content that determines the answer (`refused_members.has_meaning`): a server that refuses such
  content lacks a feature, which another server may have.
- `in_doubt`: no server is known to accept the value: in a caller's own body, the caller's fault.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from backends.body_changes import BodyChange, ChangeKind, Scalar, changed, holds, meets, nearest, shown, values_at
from backends.error_body import ErrorPart, error_parts
from backends.lessons.refusal_rows import Course, KnownRefusal, table
from backends.lessons.refused_members import has_meaning, label_of, member_path

_QUOTED = re.compile(r"'([^']{1,60})'|\"([^\"]{1,60})\"|`([^`]{1,60})`")
_BARE = re.compile(r"[\w.-]{1,60}")
_SENTENCE = re.compile(r"\.(?:\s|\Z)")
_MOST_PARTS = 8  # of an error
_MOST_VALUES = 20
_MOST_MEMBERS = 8  # named by a refusal
_WORDS = ("and", "or", "are", "is", "not", "values", "the")
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # renamed, never left out
_CHAT_LIMITS = _LIMITS[:2]  # a server that lacks either accepts the other
_MESSAGES = ("messages", "input")


class RefusalVerdict(Enum):
    UNREAD = "unread"
    MERITS = "merits"  # the request is invalid
    LACKS = "lacks"  # the server lacks what the request means
    MEND = "mend"


@dataclass(frozen=True, slots=True)
class Lesson:
    """Changes learned from a refusal. `operation`: path of another operation of the same server, for bodies that meet
    `beside`. `once`: for one request only."""

    changes: tuple[BodyChange, ...] = ()
    operation: str = ""
    beside: str = ""
    once: bool = False

    def __str__(self) -> str:
        """In words, for the operator."""
        if self.operation:
            return f"asked at {self.operation}" + (f" beside {self.beside}" if self.beside else "")
        return ", ".join(map(_words_of, self.changes))


@dataclass(frozen=True, slots=True)
class Reading:
    verdict: RefusalVerdict
    member: str = ""  # path of the refused member, as far as one is named
    lesson: Lesson | None = None
    in_doubt: bool = False


UNREAD = Reading(RefusalVerdict.UNREAD)


def read_refusal(body: bytes, sent: Mapping[str, Any]) -> Reading:
    """Classify an error reply. `sent`: the refused body; nested values may be `Raw`."""
    for part in error_parts(body)[:_MOST_PARTS]:
        for row in table().rows:
            if (matches := row.matches(part)) and (found := _read(row, part, matches, sent)) is not None:
                return found
    return UNREAD


_Matches = Sequence[re.Match[str] | None]


def _read(row: KnownRefusal, part: ErrorPart, matches: _Matches, sent: Mapping[str, Any]) -> Reading | None:
    """Read an error by a matching row. None: the request has no member that the row names."""
    match row.course:
        case Course.UNREAD:
            return UNREAD
        case Course.MERITS | Course.LACKS:
            return Reading(RefusalVerdict(row.course.value), member_path(part.member, sent) if part.member else "")
        case Course.OPERATION:
            return _operation(matches[0], part, sent)
        case Course.FOLD:
            return _folded(sent)
        case Course.FIT:
            return _mend(*[BodyChange(ChangeKind.FIT, name, values=values) for name, values in row.facts])
        case Course.ROLE:
            return _role(sent)
        case Course.PARTS:
            parts = BodyChange(ChangeKind.PARTS, row.member, values=row.was, label=row.member)
            return _mend(parts, once=row.once) if holds(sent, row.member) else None
        case Course.RENAME:
            return _renamed(matches[0], part, sent)
        case Course.REPLACE:
            return _replaced(row, matches[0], part, sent)
        case Course.LEAVE_OUT:
            return _pair(matches[0], sent) if row.pair else _left_out(row, part, matches, sent)


def _mend(*changes: BodyChange, once: bool = False, in_doubt: bool = False) -> Reading:
    return Reading(RefusalVerdict.MEND, changes[0].path, Lesson(changes, once=once), in_doubt)


def _group(match: re.Match[str] | None, name: str) -> str:
    return (match[name] or "") if match is not None and name in match.re.groupindex else ""


def _named(part: ErrorPart, match: re.Match[str] | None, sent: Mapping[str, Any]) -> str:
    """Path of the refused member, from the error's member field or else its message."""
    names = [part.member, _group(match, "m")]
    if at := _group(match, "at"):
        names.insert(0, f"{at}.{_group(match, 'm')}")
    return next((path for name in names if name and (path := member_path(name, sent))), "")


def _operation(match: re.Match[str] | None, part: ErrorPart, sent: Mapping[str, Any]) -> Reading:
    beside = "tools" if "tool" in part.words.lower() and holds(sent, "tools") else ""
    return Reading(RefusalVerdict.MEND, beside, Lesson(operation=f"/{_group(match, 'x').lower()}", beside=beside))


def _folded(sent: Mapping[str, Any]) -> Reading | None:
    fold = BodyChange(ChangeKind.FOLD, "messages", label="messages.role")
    return _mend(fold) if changed(sent, (fold,)) != sent else None


def _role(sent: Mapping[str, Any]) -> Reading | None:
    """Replace the role `developer`, the only role unknown to some servers, by `system`."""
    path = next((f"{each}.role" for each in _MESSAGES if holds(sent, f"{each}.role")), "")
    if "developer" not in values_at(sent, path) if path else True:
        return None
    return _mend(BodyChange(ChangeKind.REPLACE, path, was="developer", values=("system",), label=path))


def _renamed(match: re.Match[str] | None, part: ErrorPart, sent: Mapping[str, Any]) -> Reading | None:
    path, other = _named(part, match, sent), _group(match, "x").rstrip(".")
    if not path or path == other:
        return None
    if has_meaning(path, sent) and not (path in _LIMITS and other in _LIMITS):
        return Reading(RefusalVerdict.LACKS, path)
    to = other if "." in other else other.rpartition(".")[2]
    return _mend(BodyChange(ChangeKind.RENAME, path, to=to, label=label_of(path)))


def _pair(match: re.Match[str] | None, sent: Mapping[str, Any]) -> Reading | None:
    """The second is left out, or the first where the second has a meaning."""
    first, second = (member_path(_group(match, name), sent) for name in ("m", "x"))
    if not first or not second or first == second:
        return None
    if has_meaning(second, sent):
        first, second = second, first
    if has_meaning(second, sent):
        return Reading(RefusalVerdict.LACKS, second)
    return _mend(BodyChange(ChangeKind.LEAVE_OUT, second, beside=first, label=label_of(second)))


def _left_out(row: KnownRefusal, part: ErrorPart, matches: _Matches, sent: Mapping[str, Any]) -> Reading | None:
    if row.beside and not meets(sent, row.beside):
        return None
    paths = [row.member, row.also] if row.member else []
    for match in () if row.member else matches[:_MOST_MEMBERS]:
        names = [_named(part, match, sent), *(member_path(each, sent) for each in _listed(_group(match, "list")))]
        paths += [each for each in names if each]
    paths = [path for path in dict.fromkeys(paths) if path and holds(sent, path)]
    if not paths:
        return None
    if paths[0] in _CHAT_LIMITS and len(paths) == 1:
        other = next(each for each in _CHAT_LIMITS if each != paths[0])
        return _mend(BodyChange(ChangeKind.RENAME, paths[0], to=other, label=label_of(paths[0])))
    if lacking := next((path for path in paths if has_meaning(path, sent)), ""):
        return Reading(RefusalVerdict.LACKS, lacking)
    beside = row.beside
    changes = [BodyChange(ChangeKind.LEAVE_OUT, each, beside=beside, label=label_of(each)) for each in paths]
    return _mend(*changes, once=row.once)


def _replaced(
    row: KnownRefusal, match: re.Match[str] | None, part: ErrorPart, sent: Mapping[str, Any]
) -> Reading | None:
    path = row.member or _named(part, match, sent)
    if not path and (refused := _group(match, "v")):
        return Reading(RefusalVerdict.LACKS) if refused in _types(sent) else None
    if not path or not holds(sent, path) or (row.beside and not meets(sent, row.beside)):
        return None
    if path.rpartition(".")[2] == "role":
        return _role(sent)
    if has_meaning(path, sent):
        return Reading(RefusalVerdict.LACKS, path)
    label = label_of(path)
    if row.to:
        was = _group(match, "v") or str(values_at(sent, path)[0])
        change = BodyChange(ChangeKind.REPLACE, path, was=was, values=(row.to,), beside=row.beside, label=label)
        more = [BodyChange(ChangeKind.LEAVE_OUT, row.also, label=label_of(row.also))] if row.also else []
        return _mend(change, *more)
    values = tuple(map(_scalar, _listed(_group(match, "list"))))
    change = BodyChange(ChangeKind.REPLACE, path, values=values, label=label)
    if not values or all(nearest(each, values) is None for each in values_at(sent, path)):
        return _mend(replace(change, kind=ChangeKind.LEAVE_OUT, values=()), in_doubt=True)
    return _mend(change)


def _types(sent: Mapping[str, Any]) -> list[Any]:
    paths = ("tools.type", "messages.content.type", "input.type", "input.content.type", "response_format.type")
    return [each for path in paths for each in values_at(sent, path)]


def _listed(text: str) -> list[str]:
    """Values of a list in words: those in quotes, else all up to the end of the sentence."""
    if quoted := [next(filter(None, each)) for each in _QUOTED.findall(text)]:
        return quoted[:_MOST_VALUES]
    return [each for each in _BARE.findall(_SENTENCE.split(text)[0]) if each not in _WORDS][:_MOST_VALUES]


def _scalar(text: str) -> Scalar:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def _yaml(value: Scalar) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _words_of(change: BodyChange) -> str:
    beside = f" beside {change.beside}" if change.beside else ""
    path = shown(change.path)
    match change.kind:
        case ChangeKind.RENAME:
            return f"{path} is sent as {shown(change.to)}"
        case ChangeKind.REPLACE:
            return f"{path} is one of {', '.join(shown(str(each)) for each in change.values)}{beside}"
        case ChangeKind.FIT:
            return f"fitted to accepts.{path}: {', '.join(map(_yaml, change.values))}"
        case ChangeKind.FOLD:
            return "system messages are folded"
        case ChangeKind.PARTS:
            return f"{path} is sent without {', '.join(map(str, change.values))}"
        case _:
            return f"{path} is left out{beside}"
