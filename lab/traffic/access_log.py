"""Requests of the gateway's access log, and the shared prefixes of their prompts.

The log has a hash per so many bytes of a prompt (a landmark), and the tokens that an engine found cached. From both
`PromptChains` makes chained hashes per `block` tokens:
- Tokens per landmark are estimated from the prompts of a route.
- Behind the last landmark that two prompts share they may share less than a whole one. Where an engine found more
  tokens cached than the shared landmarks have, prompts with that prefix share so much more: the median of what was
  found.
- A prompt that continues another one begins with the tokens that the log says were kept, and with those that its engine
  found cached, where these are a few more: kept tokens are counted in whole blocks of the gateway. Behind these, only
  landmarks tell what it shares.
- The log says what a prompt continues in the order in which answers ended. The first of a template in order of arrival
  continues none, whatever the log says; a later one shares what most prompts of the template share.
- What is shared reaches into the answer: the next turn of a conversation finds it cached.
"""

from __future__ import annotations

from array import array
from base64 import b64decode
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median, median_low
from typing import Any
from zlib import crc32

CONVERSATION, TEMPLATE = "conversation", "template"  # what a prompt continues
UNANSWERED = 0  # output tokens of a request whose answer is not known
LANDMARK = 512  # tokens of a landmark, at most
BLOCKS = (16, 32, 64, 128, 256, LANDMARK)  # tokens: the first is that of engines
NEAR = 64  # tokens: two blocks of the gateway's own
MAX_PROMPT = 10_000_000  # tokens, and of an answer
MAX_TIME = 1e10  # s: as Unix time, until the year 2286
MAX_HASHES = 4_000_000  # of all prompts and answers: 32 MB
_MASK = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class LoggedAttempt:
    """Times: s after the arrival of the request."""

    endpoint: str
    opened: float
    ended: float
    ending: str
    engine_kv_tokens: int  # size of the engine's KV cache; 0: not known


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A line of the log. `met`: the TTFT budget; None: it had none, or was not judged by it."""

    number: int
    at: float  # Unix time, s
    route: str
    tenant: str
    stream: bool
    end: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None
    landmarks: Sequence[int]
    cached: int | None
    met: bool | None
    endpoint: str
    upstream: float | None  # s from the opening of the attempt that won to its first token
    tpot: float | None
    attempts: tuple[LoggedAttempt, ...]
    took: float | None  # s from arrival to the end, whatever it was
    broken: str = ""  # class of the break of the prefix; "": none
    continues: str = ""  # link to the prompt before: `conversation`, `template`; "": none
    conversation: str = ""
    template: str = ""
    kept: int = 0  # tokens of the prompt before that this one begins with

    @property
    def left_after(self) -> float | None:
        """Seconds after arrival at which the caller left; None: it stayed."""
        return self.took if self.end == "client_gone" else None

    @property
    def winner(self) -> LoggedAttempt | None:
        """The attempt that answered; None: none, or an answer without a time of its first token."""
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and self.upstream is not None and last.endpoint == self.endpoint else None


def logged_request(row: Mapping[str, Any], number: int) -> LoggedRequest | None:
    """None: a line without offered load, as a fault of the caller, or without a prompt. Raises KeyError, TypeError or
    ValueError."""
    if "access_log_lines_lost" in row or row.get("end") == "refused":
        return None
    estimated = _number(row.get("prompt_tokens_estimated") or 0, "prompt_tokens_estimated")
    prompt = row["prompt_tokens_reported"] or estimated
    answered = row.get("end", "completed") == "completed"
    if not prompt or (answered and not row["output_tokens"]) or row.get("cache") == "hit":
        return None
    if isinstance(prompt, str) or not 0 < prompt <= MAX_PROMPT:
        raise ValueError(f"a prompt of {prompt} tokens")
    cached, most = row.get("cached_tokens_reported"), row.get("max_tokens")
    attempts = tuple(map(_attempt, row.get("attempts") or ()))
    return LoggedRequest(
        number,
        _number(row["wall"], "wall", MAX_TIME),
        str(row["route"]),
        str(row.get("tenant", "")),
        bool(row.get("stream", True)),
        str(row.get("end", "completed")),
        max(int(prompt), 1),
        int(_number(row["output_tokens"], "output_tokens", MAX_PROMPT)) if answered else UNANSWERED,
        None if most is None else int(_number(most, "max_tokens")),
        array("Q", b64decode(row["prefix"])) if row.get("prefix") else (),
        None if cached is None else int(_number(cached, "cached_tokens_reported", MAX_PROMPT)),
        row.get("ttft_met"),
        str(row.get("endpoint", "")),
        _upstream(row, attempts),
        _seconds(row, "tpot_ms"),
        attempts,
        _seconds(row, "total_ms"),
        str((row.get("prefix_break") or {}).get("class", "")),
        *_lineage(row, int(prompt)),
    )


def _lineage(row: Mapping[str, Any], prompt: int) -> tuple[str, str, str, int]:
    """Kept tokens are as the engine counts, like the length of a prompt."""
    continues = str(row.get("continues") or "")
    kept = _number(row.get("kept_tokens") or 0, "kept_tokens", MAX_PROMPT)
    link = continues if continues in (CONVERSATION, TEMPLATE) else ""
    return link, str(row.get("session") or ""), str(row.get("template") or ""), min(int(kept), prompt)


def _attempt(row: Mapping[str, Any]) -> LoggedAttempt:
    opened, ended = (_number(row[name], name, MAX_TIME) / 1e3 for name in ("opened_ms", "ended_ms"))
    kv_tokens = int(_number(row.get("engine_kv_tokens") or 0, "engine_kv_tokens"))
    return LoggedAttempt(str(row["endpoint"]), opened, ended, str(row["ending"]), kv_tokens)


def _upstream(row: Mapping[str, Any], attempts: Sequence[LoggedAttempt]) -> float | None:
    first = _seconds(row, "ttft_ms")
    if first is None or not attempts:
        return None
    after = _number(row["stages_ms"].get("relay", 0.0), "relay", MAX_TIME) / 1e3
    took = first - after - attempts[-1].opened
    return took if took > 0 else None


def _seconds(row: Mapping[str, Any], name: str) -> float | None:
    return None if (ms := row.get(name)) is None else _number(ms, name, MAX_TIME) / 1e3


def _number(value: Any, name: str, most: float = 1e15) -> float:
    """Raises ValueError. A log is written by whatever ran: NaN, which JSON of Python has, compares with nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{name} is {value!r:.40}")
    return value


# ---------------------------------------------------------------- shared prefixes


def block_of(requests: Iterable[LoggedRequest]) -> int:
    """Tokens per hash: as few as keep the hashes of all prompts, and answers of conversations, below MAX_HASHES."""
    tokens = sum(each.prompt_tokens + (each.output_tokens if each.conversation else 0) for each in requests)
    return next((block for block in BLOCKS if tokens / block <= MAX_HASHES), LANDMARK)


class PromptChains:
    """`requests` in order of time, and so are those of `chain`."""

    def __init__(self, requests: Sequence[LoggedRequest], block: int) -> None:
        self.block = block
        self._span = _spans(requests)
        self._shared = self._beyond(requests)
        self._of_template = _template_tokens(requests)
        self._last: dict[tuple[str, str], tuple[int, array[int]]] = {}  # tokens and hashes, by caller and conversation

    def chain(self, request: LoggedRequest) -> tuple[array[int], array[int]]:
        """Hashes of the full blocks of the prompt, and of the answer as far as a later prompt shares it."""
        prompt, span = request.prompt_tokens // self.block, self._span[request.route]
        hashes = self._continued(request)
        end = (request.prompt_tokens + request.output_tokens) // self.block
        for number in range(len(hashes), end):
            name = self._name(request, number, span)
            if name is None and number >= prompt and not request.conversation:
                break
            before = hashes[-1] if hashes else 0  # equal hashes mean equal prompts up to there
            hashes.append(hash((before, name or (request.number, request.at, number))) & _MASK)
        for link in filter(None, (request.conversation, request.template)):
            self._last[request.tenant, link] = (request.prompt_tokens, hashes)
        return hashes[:prompt], hashes[prompt:]

    def _continued(self, request: LoggedRequest) -> array[int]:
        """Hashes that a prompt shares with the one before: with its answer too, where nothing of the prompt was left
        out."""
        known = self._last.get((request.tenant, request.conversation)) if request.continues == CONVERSATION else None
        if known is not None:
            tokens, hashes = known
            is_whole = request.kept > tokens - NEAR / 2
            return hashes[: (request.prompt_tokens if is_whole else _exact(request.kept, request.cached)) // self.block]
        template = request.tenant, request.template
        shared = self._of_template.get(template, 0)
        kept = request.kept if request.continues else shared
        _, hashes = self._last.get(template, (0, array("Q")))
        return hashes[: _exact(kept, request.cached, shared) // self.block]

    def _name(self, request: LoggedRequest, number: int, span: float) -> tuple[int, int] | None:
        """Equal for equal prefixes; None for a block that is not known to be shared."""
        marks, end = request.landmarks, (number + 1) * self.block
        mark = min(int((end - 1) / span), len(marks))
        before = marks[mark - 1] if mark else _root(request)
        if not request.continues and end <= mark * span + self._shared.get(before, 0.0):
            return (before, number)
        return (marks[mark], number) if mark < len(marks) else None

    def _beyond(self, requests: Iterable[LoggedRequest]) -> dict[int, float]:
        """Tokens that prompts share behind a landmark, by landmark."""
        found, seen = defaultdict[int, list[float]](list), set[int]()
        for request in requests:
            marks = request.landmarks
            shared = next((i for i, mark in enumerate(marks) if mark not in seen), len(marks))
            seen.update(marks)
            more = (request.cached or 0) - shared * self._span[request.route]
            if request.cached and more > 0:
                found[marks[shared - 1] if shared else _root(request)].append(more)
        return {before: median_low(more) for before, more in found.items()}


def _template_tokens(requests: Iterable[LoggedRequest]) -> Mapping[tuple[str, str], int]:
    """Tokens that engines found cached of the prompts of a template, by caller and template: the median."""
    found = defaultdict[tuple[str, str], list[int]](list)
    for request in requests:
        if request.continues == TEMPLATE and request.cached == _exact(request.kept, request.cached):
            found[request.tenant, request.template].append(request.cached)
    return {template: median_low(tokens) for template, tokens in found.items()}


def _exact(kept: int, *found: int | None) -> int:
    """Tokens of the first of `found` that is about as many; else those that were kept."""
    return next((tokens for tokens in found if tokens is not None and abs(tokens - kept) < NEAR), kept)


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """Place of a request in its conversation, `session`, from 1; 0: none. `think`: s between the end of the turn before
    and this one; None: it is the first, or did not wait for that end, or the log does not tell."""

    session: int = 0
    think: float | None = None


def turns(requests: Iterable[LoggedRequest]) -> Iterator[LoggedTurn]:
    """Of each request, in order of time."""
    ends, numbers = dict[tuple[str, str, str], float](), dict[tuple[str, str, str], int]()
    for request in requests:
        if not request.conversation:
            yield LoggedTurn()
            continue
        name = request.route, request.tenant, request.conversation
        think = request.at - ends.get(name, inf)
        ends[name] = inf if request.took is None else request.at + request.took
        yield LoggedTurn(numbers.setdefault(name, len(numbers) + 1), think if think >= 0 else None)


def _root(request: LoggedRequest) -> int:
    """Stands for the landmark before the first: callers share no cache."""
    return crc32(f"{request.route}\0{request.tenant}".encode())


def _spans(requests: Iterable[LoggedRequest]) -> Mapping[str, float]:
    """Tokens per landmark, by route."""
    spans = defaultdict[str, list[float]](list)
    for request in requests:
        if request.landmarks:
            spans[request.route].append(request.prompt_tokens / (len(request.landmarks) + 0.5))
    found = defaultdict[str, float](lambda: LANDMARK)
    return found | {route: max(min(median(known), LANDMARK), 1.0) for route, known in spans.items()}
