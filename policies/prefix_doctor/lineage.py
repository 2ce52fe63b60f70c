"""The prompt that a prompt continues, and the place where it departs although the text behind is the same.

Rules:
- A prompt continues the last one of its conversation: of the same name, if the caller gives one, and with the same
  first message of the user. Without such, the last of the same name, then the last with the same end of the system
  prompt: a template that many conversations share.
- A break: prompts depart, and later parts are equal again. What would have been shared without the change is lost; less
  than NOTICEABLE tokens are no break. An edited last message is none, since nothing equal follows.
- Callers share nothing. Each has its own conversations; memory is bounded in bytes, and what is too much is given up by
  the caller with most.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heapreplace
from typing import Any, NamedTuple

from policies.prefix_doctor.break_class import BreakClass, BreakMark, changed_class
from policies.prompt_outline import TOOLS, PartOutline, PromptOutline

NOTICEABLE = 128  # tokens
HASHES = 4096  # blocks of a prompt that are kept: 120,000 tokens
CALLERS = 1024
CONVERSATIONS = 512  # names of prompts, of one caller
MEMORY = 16_000_000  # bytes
ENTRY = 600  # bytes of an entry without digests and hashes (tracemalloc)
SHIFT = 64  # messages that may be left out or inserted

ReadBreakMark = Callable[[int, int, int], BreakMark | None]  # part, byte where it begins, block; None: not now


class Link(StrEnum):
    """The kind of name by which a prompt was found to continue another."""

    NONE = "none"
    CONVERSATION = "conversation"
    TEMPLATE = "template"


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """`at`: tokens up to the break; `lost`: tokens behind that would have been shared; `block`: number of the first
    block that differs; 0 of tools."""

    cls: BreakClass
    role: str
    at: int
    lost: int
    block: int

    def as_json(self) -> dict[str, Any]:
        tokens = {"at_tokens": self.at, "lost_tokens": self.lost, "block": self.block}
        return {"class": self.cls.value, "role": self.role, **tokens}


@dataclass(frozen=True, slots=True)
class Lineage:
    """Of one prompt. `conversation`, `template`: names, as keyed hashes; 0: none. `since`: s since the step before;
    `kept`: tokens at the beginning that the prompt before had too; `previous`: all of its tokens; None: there is
    none."""

    conversation: int = 0
    template: int = 0
    step: int = 1
    since: float | None = None
    kept: int | None = None
    broken: PrefixBreak | None = None
    link: Link = Link.NONE
    previous: int | None = None

    @property
    def kept_share(self) -> float | None:
        """Share of the prompt before."""
        return min(self.kept / self.previous, 1.0) if self.kept is not None and self.previous else None


class SentNow(NamedTuple):
    """`session`: name of the conversation; empty: none is named. Times are those of the request."""

    caller: str
    route: str
    session: str
    arrived: float
    ended: float


class FollowedPrompt(NamedTuple):
    """A prompt of a caller, whose request ended `at`. `marked`: the block of a break, its mark, and its class."""

    digests: array[int]
    hashes: Sequence[int]
    step: int
    tokens: int
    at: float
    marked: tuple[int, BreakMark | None, BreakClass] | None = None

    @property
    def bytes(self) -> int:
        return ENTRY + 8 * (len(self.digests) + len(self.hashes))


@dataclass(slots=True)
class CallerPrompts:
    """The latest prompts of one caller, by name."""

    by_name: OrderedDict[int, FollowedPrompt] = field(default_factory=OrderedDict)
    bytes: int = 0

    def put(self, name: int, prompt: FollowedPrompt) -> int:
        """Returns the change in bytes."""
        before = self.bytes
        if (replaced := self.by_name.pop(name, None)) is not None:
            self.bytes -= replaced.bytes
        self.by_name[name] = prompt
        self.bytes += prompt.bytes
        if len(self.by_name) > CONVERSATIONS:
            self.drop_oldest()
        return self.bytes - before

    def drop_oldest(self) -> int:
        """Returns the bytes that are free."""
        freed = self.by_name.popitem(last=False)[1].bytes
        self.bytes -= freed
        return freed


class Lineages:
    """The latest prompts of all callers. `bytes`: kept, counted as if no two names shared a prompt."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = memory
        self._callers: OrderedDict[str, CallerPrompts] = OrderedDict()
        self.bytes = 0

    def follow(self, sent: SentNow, outline: PromptOutline, read_mark: ReadBreakMark) -> Lineage:
        """Note a prompt, and find what it continues."""
        known, names = self._of(sent.caller), _names(sent.route, sent.session, outline)
        found, last, link = _departed(known, names, outline)
        lineage = Lineage(names.conversation, names.template)
        marked = None
        if last is not None:
            broken, marked = None, last.marked
            if found is not None and found.lost >= NOTICEABLE:
                marked = _marked(last, found, outline, read_mark)
                at = round(outline.tokens_at(found.block))
                broken = PrefixBreak(marked[2], found.part.role.value, at, round(found.lost), found.place)
            lineage = _continued(names, link, last, found, outline, sent.arrived, broken)
        hashes = outline.hashes[:HASHES]
        prompt = FollowedPrompt(outline.digests, hashes, lineage.step, outline.tokens, sent.ended, marked)
        self._note(known, names, prompt)
        return lineage

    def _of(self, caller: str) -> CallerPrompts:
        known = self._callers.get(caller)
        if known is None:
            known = self._callers[caller] = CallerPrompts()
            if len(self._callers) > CALLERS:
                self.bytes -= self._callers.popitem(last=False)[1].bytes
        else:
            self._callers.move_to_end(caller)
        return known

    def _note(self, known: CallerPrompts, names: PromptNames, prompt: FollowedPrompt) -> None:
        for name in {*names} - {0}:
            self.bytes += known.put(name, prompt)
        if self.bytes > self._memory:
            self._make_room()

    def _make_room(self) -> None:
        """An eighth is given up at a time, prompt by prompt, by the caller with most at each: a heap of all callers is
        made seldom, and a prompt costs its logarithm, however many callers there are."""
        heap = [(-each.bytes, number, each) for number, each in enumerate(self._callers.values())]
        heapify(heap)
        while self.bytes > self._memory * 7 // 8:
            _, number, most = heap[0]
            self.bytes -= most.drop_oldest()
            heapreplace(heap, (-most.bytes, number, most))


class PromptNames(NamedTuple):
    """Names under which a prompt is kept; 0: none. `exact`: conversation and first message; `conversation`: as the
    caller names it, else `exact`."""

    exact: int
    conversation: int
    template: int


def _names(route: str, session: str, outline: PromptOutline) -> PromptNames:
    exact = hash((route, session, outline.opening)) if session or outline.opening else 0
    return PromptNames(
        exact,
        hash((route, session)) if session else exact,
        hash((route, "template", outline.template)) if outline.template else 0,
    )


class Departure(NamedTuple):
    """`part`: the first that differs; `block`: the first that differs; `lost`: tokens."""

    part: PartOutline
    number: int
    block: int
    lost: float
    cls: BreakClass | None  # told by the digests alone

    @property
    def place(self) -> int:
        """Tools in another order differ from another block on with every prompt: their place is the first."""
        return 0 if self.part.role is TOOLS else self.block


def _departed(
    known: CallerPrompts, names: PromptNames, outline: PromptOutline
) -> tuple[Departure | None, FollowedPrompt | None, Link]:
    """Find the earlier prompt, and the place at which this prompt departs from it; None: not before its end."""
    for name in dict.fromkeys((names.exact, names.conversation)):
        if name and (last := known.by_name.get(name)) is not None:
            return departure(last, outline, is_template=False), last, Link.CONVERSATION
    if names.template and (last := known.by_name.get(names.template)) is not None:
        return departure(last, outline, is_template=True), last, Link.TEMPLATE
    return None, None, Link.NONE


def departure(last: FollowedPrompt, outline: PromptOutline, *, is_template: bool) -> Departure | None:
    """None: the prompt continues the earlier one, or is its beginning. `is_template`: the system prompts have the same
    end."""
    before, digests = last.digests, outline.digests
    common = min(len(before), len(digests))
    if before[:common] == digests[:common]:
        return None
    number = next(i for i in range(common) if before[i] != digests[i])
    end, cls = _equal_until(before, digests, number)
    if end == number and is_template:
        end = max(_head(outline), number)
    block = shared_blocks(last.hashes, outline.hashes)
    behind = _tokens(outline, end) - outline.tokens_at(block) if end > number else 0.0
    return Departure(outline.parts[number], number, block, max(behind, 0.0), cls)


def _equal_until(before: array[int], digests: array[int], at: int) -> tuple[int, BreakClass | None]:
    """The end of the parts that both prompts have behind part `at`, which differs; `at`: there are none."""
    if (run := _run(before, at + 1, digests, at + 1)) > 0:
        return at + 1 + run, None
    for shift in range(1, min(SHIFT, len(before) - at)):
        if before[at + shift] == digests[at]:
            return at + _run(before, at + shift, digests, at), BreakClass.HISTORY_CUT
    for shift in range(1, min(SHIFT, len(digests) - at)):
        if digests[at + shift] == before[at]:
            return at + shift + _run(before, at, digests, at + shift), BreakClass.INSERTED
    return at, None


def _run(before: array[int], i: int, digests: array[int], j: int) -> int:
    """Equal parts from there on."""
    length = 0
    while i + length < len(before) and j + length < len(digests) and before[i + length] == digests[j + length]:
        length += 1
    return length


def _head(outline: PromptOutline) -> int:
    """Number of parts before the first one that is neither a definition nor a system message."""
    parts = outline.parts
    return next((i for i, part in enumerate(parts) if part.role not in ("tools", "system")), len(parts))


def shared_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    """Blocks at the beginning of both. Hashes are chained: equal ones mean an equal beginning up to there."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda i: one[i] != other[i])


def _tokens(outline: PromptOutline, parts: int) -> float:
    """Tokens of so many parts, as the engine counts."""
    own = outline.parts[-1].tokens
    return outline.parts[parts - 1].tokens * outline.tokens / own if own else 0.0


def _kept(last: FollowedPrompt, outline: PromptOutline) -> float:
    """Tokens that a prompt shares with an earlier prompt of which one continues the other."""
    return _tokens(outline, min(len(last.digests), len(outline.parts)))


def _continued(
    names: PromptNames,
    link: Link,
    last: FollowedPrompt,
    found: Departure | None,
    outline: PromptOutline,
    arrived: float,
    broken: PrefixBreak | None,
) -> Lineage:
    kept = round(_kept(last, outline) if found is None else outline.tokens_at(found.block))
    if link is Link.TEMPLATE:
        return Lineage(names.conversation, names.template, 1, None, kept, broken, link, last.tokens)
    step, since = _step(last, names, outline), max(arrived - last.at, 0.0)
    return Lineage(names.conversation, names.template, step, since, kept, broken, link, last.tokens)


def _step(last: FollowedPrompt, names: PromptNames, outline: PromptOutline) -> int:
    """A prompt that is no longer, in a conversation without a name, asks the same again."""
    return last.step + (names.exact != names.conversation or len(outline.digests) > len(last.digests))


def _marked(
    last: FollowedPrompt, found: Departure, outline: PromptOutline, read_mark: ReadBreakMark
) -> tuple[int, BreakMark | None, BreakClass]:
    """The mark of this break, and its class: by the mark of the one before, at the same place."""
    block, before = found.block, last.marked
    if found.cls is not None:
        return block, None, found.cls
    if before is None or (before[0] != block and found.part.role is not TOOLS):
        return block, _read(found, outline, read_mark), BreakClass.UNCLASSIFIED
    after = _read(found, outline, read_mark)
    if after is None or before[1] is None:
        return block, after or before[1], before[2]
    cls = changed_class(before[1], after)
    return block, after, before[2] if cls is BreakClass.UNCLASSIFIED else cls


def _read(found: Departure, outline: PromptOutline, read_mark: ReadBreakMark) -> BreakMark | None:
    start = outline.parts[found.number - 1].size if found.number else 0
    return read_mark(found.number, start, found.block)
