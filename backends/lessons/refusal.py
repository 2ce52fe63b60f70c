"""Reads a refusal (400, 422) as a lesson: a change of the body, or another operation, that the server would accept.

Pure: computed from the error body and the request body. Known forms are rows of a table (`refusals.yaml`).

Rules:
- The error's own parts are read in order: `param`, places, violations, the message, then an error inside the error. The
  first row that fits a part, and whose member was sent, counts.
- A lesson removes no content that determines the answer (`RefusedBody.has_meaning`): a server that refuses such content
  lacks a feature, which another server may have. A member gets another name only where no other meaning arises.
- `in_doubt`: no server is known to accept the value: in a caller's own body, the caller's fault.
- Callers write names and values that servers quote. A lesson whose words stand in the body, or were cut, is for the one
  request (`Lesson.once`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import takewhile
from typing import Any

from backends.body_changes import BodyChange, ChangeKind, Scalar, changed, nearest, shown
from backends.error_body import ErrorPart, error_parts
from backends.lessons.refusal_rows import NUMBER, READ, Course, KnownRefusal, table
from backends.lessons.refused_members import RefusedBody, label_of, may_mean

_QUOTED = re.compile(r"'([^']{1,60})'|\"([^\"]{1,60})\"|`([^`]{1,60})`")
_BARE = re.compile(r"[\w.-]{1,60}")
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?", re.ASCII)
_REST = re.compile(r"\.(?:\s|\Z)|[,;(]? ?\b(?:but|got|received|given|found|provided|instead)\b", re.IGNORECASE)
_MOST_PARTS = 8  # of an error
_MOST_MEMBERS = 4  # of a lesson
_LONGEST_LIST = 400  # characters
_LONGEST_COMPLAINT = 60
_WORDS = ("and", "or", "are", "is", "not", "values", "the")
_CHAT_LIMITS = ("max_tokens", "max_completion_tokens")  # a server that lacks either accepts the other
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

    @property
    def concerns_all(self) -> bool:
        """Other callers have such members: no name is a caller's own invention."""
        return all(each.kind is ChangeKind.FIT or each.label != "other" for each in self.changes)


@dataclass(frozen=True, slots=True)
class Complaint:
    """Words of a server about a body. `member`: as spelled by the server."""

    member: str = ""
    words: str = ""

    def is_in(self, refusal: bytes) -> bool:
        """A later refusal says the same: the change did not help."""
        parts = error_parts(refusal)[:_MOST_PARTS]
        return any(each.member == self.member and self.words in each.words for each in parts)


@dataclass(frozen=True, slots=True)
class Reading:
    verdict: RefusalVerdict
    member: str = ""  # path of the refused member, as far as one is named
    lesson: Lesson | None = None
    in_doubt: bool = False
    complaint: Complaint = Complaint()


UNREAD = Reading(RefusalVerdict.UNREAD)


def read_refusal(refusal: bytes, sent: Mapping[str, Any], raw: bytes = b"") -> Reading:
    """Classify an error reply. `sent`: the refused body; nested values may be `Raw`. `raw`: its bytes."""
    body = RefusedBody(sent, raw)
    for part in error_parts(refusal)[:_MOST_PARTS]:
        for row in table().rows:
            if (matches := row.matches(part)) and (found := _read(row, part, matches, body)) is not None:
                return _attributed(found, part, matches, body)
    return UNREAD


_Matches = Sequence[re.Match[str] | None]


def _attributed(reading: Reading, part: ErrorPart, matches: _Matches, body: RefusedBody) -> Reading:
    """The reading with its complaint. Words of the caller, and words without their end, teach nothing that lasts."""
    words = matches[0][0][:_LONGEST_COMPLAINT] if matches[0] is not None else ""
    lesson = reading.lesson
    if lesson is not None and any(_is_doubtful(each, part, body) for each in matches if each is not None):
        lesson = replace(lesson, once=True)
    return replace(reading, lesson=lesson, complaint=Complaint(part.member, words))


def _is_doubtful(match: re.Match[str], part: ErrorPart, body: RefusedBody) -> bool:
    is_cut = len(part.words) > READ and match.end() == READ
    return is_cut or len(_group(match, "list")) >= _LONGEST_LIST or body.says(match[0][:_LONGEST_COMPLAINT])


def _read(row: KnownRefusal, part: ErrorPart, matches: _Matches, sent: RefusedBody) -> Reading | None:
    """Read an error by a matching row. None: the request has no member that the row names."""
    match row.course:
        case Course.UNREAD:
            return UNREAD
        case Course.MERITS | Course.LACKS:
            return Reading(RefusalVerdict(row.course.value), sent.path(part.member))
        case Course.OPERATION:
            return _operation(matches[0], part, sent)
        case Course.FOLD:
            return _folded(sent)
        case Course.FIT:
            facts = [(name, _told(values, matches[0])) for name, values in row.facts]
            return _mend(*[BodyChange(ChangeKind.FIT, name, values=values) for name, values in facts])
        case Course.ROLE:
            return _role(sent)
        case Course.PARTS:
            parts = BodyChange(ChangeKind.PARTS, row.member, values=row.was, label=row.member)
            return _mend(parts, once=row.once) if sent.holds(row.member) else None
        case Course.RENAME:
            return _renamed(matches[0], part, sent)
        case Course.REPLACE:
            return _replaced(row, matches[0], part, sent)
        case Course.LEAVE_OUT:
            return _pair(matches[0], sent) if row.pair else _left_out(row, part, matches, sent)


def _mend(*changes: BodyChange, once: bool = False, in_doubt: bool = False) -> Reading:
    return Reading(RefusalVerdict.MEND, changes[0].path, Lesson(changes, once=once), in_doubt)


def _told(values: tuple[Scalar, ...], match: re.Match[str] | None) -> tuple[Scalar, ...]:
    """Values of a fact; the number in the words of the refusal takes the place of NUMBER."""
    return tuple(int(_group(match, "n")) if value == NUMBER else value for value in values)


def _group(match: re.Match[str] | None, name: str) -> str:
    return (match[name] or "") if match is not None and name in match.re.groupindex else ""


def _named(part: ErrorPart, match: re.Match[str] | None, sent: RefusedBody) -> str:
    """Path of the refused member, from the error's member field or else its message."""
    names = [part.member, _group(match, "m")]
    if at := _group(match, "at"):
        names.insert(0, f"{at}.{_group(match, 'm')}")
    return next((path for name in names if name and (path := sent.path(name))), "")


def _operation(match: re.Match[str] | None, part: ErrorPart, sent: RefusedBody) -> Reading:
    beside = "tools" if "tool" in part.words.lower() and sent.holds("tools") else ""
    return Reading(RefusalVerdict.MEND, beside, Lesson(operation=f"/{_group(match, 'x').lower()}", beside=beside))


def _folded(sent: RefusedBody) -> Reading | None:
    fold = BodyChange(ChangeKind.FOLD, "messages", label="messages.role")
    return _mend(fold) if changed(sent.members, (fold,)) != sent.members else None


def _role(sent: RefusedBody) -> Reading | None:
    """Replace the role `developer`, the only role unknown to some servers, by `system`."""
    path = next((f"{each}.role" for each in _MESSAGES if sent.holds(f"{each}.role")), "")
    if "developer" not in sent.values(path) if path else True:
        return None
    return _mend(BodyChange(ChangeKind.REPLACE, path, was="developer", values=("system",), label=path))


def _renamed(match: re.Match[str] | None, part: ErrorPart, sent: RefusedBody) -> Reading | None:
    path, to = _named(part, match, sent), _group(match, "x").rstrip(".")
    if not path or path == to:
        return None
    if is_same := table().are_same(path, to):
        return _mend(BodyChange(ChangeKind.RENAME, path, to=to, same=is_same, label=label_of(path)))
    holder, _, _ = path.rpartition(".")
    place = f"{holder}.{to}" if holder and "." not in to else to
    is_free = to.count(".") < 2 and label_of(to) == "other" and not may_mean(place) and not sent.holds(place)
    if sent.has_meaning(path) or not is_free:
        return Reading(RefusalVerdict.LACKS, path)
    return _mend(BodyChange(ChangeKind.RENAME, path, to=to, label=label_of(path)))


def _pair(match: re.Match[str] | None, sent: RefusedBody) -> Reading | None:
    """The second is left out, or the first where the second has a meaning."""
    first, second = (sent.path(_group(match, name)) for name in ("m", "x"))
    if not first or not second or first == second:
        return None
    if sent.has_meaning(second):
        first, second = second, first
    if sent.has_meaning(second):
        return Reading(RefusalVerdict.LACKS, second)
    return _mend(BodyChange(ChangeKind.LEAVE_OUT, second, beside=first, label=label_of(second)))


def _left_out(row: KnownRefusal, part: ErrorPart, matches: _Matches, sent: RefusedBody) -> Reading | None:
    if row.beside and not sent.meets(row.beside):
        return None
    named = [row.member, row.also] if row.member else _all_named(part, matches, sent)
    paths = [path for path in dict.fromkeys(named) if path and sent.holds(path)][:_MOST_MEMBERS]
    if not paths:
        return None
    if paths[0] in _CHAT_LIMITS and len(paths) == 1:
        other = next(each for each in _CHAT_LIMITS if each != paths[0])
        return _mend(BodyChange(ChangeKind.RENAME, paths[0], to=other, same=True, label=label_of(paths[0])))
    if lacking := next((path for path in paths if sent.has_meaning(path)), ""):
        return Reading(RefusalVerdict.LACKS, lacking)
    beside = row.beside
    changes = [BodyChange(ChangeKind.LEAVE_OUT, each, beside=beside, label=label_of(each)) for each in paths]
    return _mend(*changes, once=row.once)


def _all_named(part: ErrorPart, matches: _Matches, sent: RefusedBody) -> list[str]:
    """Paths of the refused members; empty: no member of the body. Servers list what was sent: a list with another name
    is of the caller's making, as is all behind that name."""
    paths: list[str] = []
    for match in matches:
        paths.append(_named(part, match, sent))
        listed = [sent.path(each) for each in _listed(_group(match, "list"))]
        paths += takewhile(bool, listed)
    return paths


def _replaced(row: KnownRefusal, match: re.Match[str] | None, part: ErrorPart, sent: RefusedBody) -> Reading | None:
    path = row.member or _named(part, match, sent)
    if not path and (refused := _group(match, "v")):
        return Reading(RefusalVerdict.LACKS) if refused in _types(sent) else None
    if not path or not sent.holds(path) or (row.beside and not sent.meets(row.beside)):
        return None
    if path.rpartition(".")[2] == "role":
        return _role(sent)
    if sent.has_meaning(path):
        return Reading(RefusalVerdict.LACKS, path)
    label = label_of(path)
    if row.to:
        was = _group(match, "v") or str(sent.values(path)[0])
        change = BodyChange(ChangeKind.REPLACE, path, was=was, values=(row.to,), beside=row.beside, label=label)
        more = [BodyChange(ChangeKind.LEAVE_OUT, row.also, label=label_of(row.also))] if row.also else []
        return _mend(change, *more)
    values = tuple(map(_scalar, _listed(_group(match, "list"))))
    change = BodyChange(ChangeKind.REPLACE, path, values=values, label=label)
    if not values or all(nearest(each, values) is None for each in sent.values(path)):
        return _mend(replace(change, kind=ChangeKind.LEAVE_OUT, values=()), in_doubt=True)
    return _mend(change)


def _types(sent: RefusedBody) -> list[Any]:
    paths = ("tools.type", "messages.content.type", "input.type", "input.content.type", "response_format.type")
    return [each for path in paths for each in sent.values(path)]


def _listed(text: str) -> list[str]:
    """Values of a list in words, up to the end of the sentence: those in quotes, else all."""
    text = _REST.split(text)[0]
    if quoted := [next(filter(None, each)) for each in _QUOTED.findall(text)]:
        return quoted
    return [each for each in _BARE.findall(text) if each not in _WORDS]


def _scalar(text: str) -> Scalar:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not _NUMBER.fullmatch(text):
        return text
    return float(text) if "." in text else int(text)


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
