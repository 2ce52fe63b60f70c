"""Errors of a configuration, their format, and mends for common mistakes.

Rules:
- One line per problem: location, problem, remedy. All problems of a stage are reported together.
- A value from the environment is never shown, only its `${NAME}`.
- A literal key or password is not shown either, nor any YAML alias, tag or reference of the length of a secret.

Mistakes with a mend are keys in the wrong place or of other programs, and YAML whose own error says none. A hint is the
end of a message, beginning with `; `; it repeats no value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # not imported before a command reads a file
    import yaml

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


MAX_PLACES = 3
_LITELLM = "; this is LiteLLM's: firsttoken import litellm FILE writes a configuration of ours"
_STACK = "; these are values of vLLM's production-stack: firsttoken import production-stack FILE writes a configuration"
FOREIGN: Mapping[str, str] = {
    **dict.fromkeys(("model_list", "litellm_settings", "router_settings", "general_settings"), _LITELLM),
    **dict.fromkeys(("servingEngineSpec", "routerSpec"), _STACK),
}
_TIMES = "; limits of time are first_token and stream_idle of a pool, and total: {limit} of a route"
_OF_CALLERS = "; limits per minute are of a caller's key: keys: [{requests_per_minute, tokens_per_minute}]"
# Words of other programs, by the section: pools, routes, or "" for all.
SYNONYMS: Mapping[tuple[str, str], str] = {
    ("pools", "url"): "; write endpoints: [URL]",
    ("pools", "urls"): "; write endpoints: [URL]",
    ("pools", "host"): "; write endpoints: [http://HOST:PORT]",
    ("pools", "api_base"): "; write endpoints: [URL], or base_url of an API",
    ("pools", "servers"): "; write endpoints: [URL]",
    ("pools", "name"): "; the key is the pool's name; remove this",
    ("pools", "provider"): "; write backend: NAME",
    ("pools", "type"): "; write backend: NAME",
    ("pools", "model_name"): "; write model: NAME, as its servers know it",
    ("pools", "rpm"): "; write requests_per_minute",
    ("pools", "tpm"): "; write tokens_per_minute",
    ("pools", "max_parallel_requests"): "; write concurrent_requests",
    ("pools", "autoscale"): "; remove it, and run firsttoken autoscale --pool NAME=MIN..MAX@START_TIME",
    ("routes", "pools"): "; write tiers: [POOL]",
    ("routes", "pool"): "; write tiers: [POOL]",
    ("routes", "fallbacks"): "; write them into tiers, most wanted first",
    ("routes", "models"): "; write tiers: [POOL]",
    ("routes", "budget"): "; write ttft: {budget: TIME}",
    ("routes", "slo"): "; write ttft: {budget: TIME}",
    ("routes", "priority"): "; write workload: NAME; a caller's priority is a condition: `when`",
    ("routes", "session"): "; it was removed: the time of each step is total_ms of its Record, with the session's name",
    ("server", "port"): "; write listen: 127.0.0.1:PORT",
    ("server", "host"): "; write listen: HOST:PORT",
    ("server", "admin_port"): "; write admin: 127.0.0.1:PORT",
    ("keys", "key"): '; write sha256, the digest of the key: printf %s "$KEY" | sha256sum',
    ("telemetry", "level"): "; there are no levels: access_log is a line for each request",
    ("telemetry", "log_level"): "; there are no levels: access_log is a line for each request",
    **dict.fromkeys((("", name) for name in ("timeout", "request_timeout", "stream_timeout")), _TIMES),
    **dict.fromkeys((("", name) for name in ("rpm", "tpm", "rate_limit")), _OF_CALLERS),
    **dict.fromkeys(
        (("", name) for name in ("retries", "num_retries", "max_retries")),
        "; write max_attempts on the route, or under defaults: the first attempt counts",
    ),
}
REMOVED: Mapping[str, str] = {  # values of earlier versions
    "move_timestamp": "; it was removed: write the time at the end of the last message",
}
SHORT_FORMS: Mapping[str, str] = {  # sections of one main key, by name
    "ttft": "budget",
    "tpot": "budget",
    "total": "budget",
    "hedge": "max_extra",
    "keep_warm": "idle",
    "adapters": "names",
}
_SYNTAX = (  # part of PyYAML's words, and the mend
    ("cannot start any token", "text that begins with this character needs quotes"),
    ("expected alphabetic or numeric character", "text that begins with * or & needs quotes"),
    ("expected a comment or a line break", "text that begins with > or | needs quotes"),
    ("expected chomping or indentation", "text that begins with > or | needs quotes"),
    ("expected <block end>", "indent this line as those beside it"),
    ("mapping values are not allowed here", "the line before lacks its colon, or text with a colon its quotes"),
    ("could not find expected ':'", "a key lacks its colon, or the blank after it"),
)
_BARE_VARIABLE = re.compile(r"(?:^|[\s:,\[{-])\$\{([A-Za-z_][A-Za-z0-9_]*)")


def unknown_key(path: Path, known: list[str], places: Mapping[str, list[str]]) -> str:
    """Of the key at the end of `path`. `places`: sections that have a key, by its name."""
    name, section = str(path[-1]), str(path[0]) if len(path) > 1 else ""
    if not section and name in FOREIGN:
        return FOREIGN[name]
    if name not in known and (found := SYNONYMS.get((section, name)) or SYNONYMS.get(("", name))):
        return found
    if section == "pools" and len(path) == 2:
        return did_you_mean(name, known)
    if near := nearest(name.replace("-", "_"), known):
        return near
    if elsewhere := places.get(name, [])[:MAX_PLACES]:
        return f"; it belongs to {' or '.join(elsewhere)}"
    return did_you_mean(name, known)


def joined_value(name: str, known: Iterable[str]) -> str:
    """The known key with which `name` begins, where a value is written next to it: `api_key:VALUE`. Empty: none."""
    key, mark, _ = re.sub(r"[:=]", "\0", name, count=1).partition("\0")
    return key.strip() if mark and key.strip() in known else ""


def as_list(got: object) -> str:
    """Of a value in place of a list."""
    if isinstance(got, str) and got.startswith("-"):
        return "; a blank belongs after the dash"
    return "; write it in [ ]" if isinstance(got, str) else ""


def as_mapping(path: Path, got: object) -> str:
    """Of a value in place of a mapping."""
    if len(path) == 1 and isinstance(got, list):
        return "; each is NAME: {...}"
    key = SHORT_FORMS.get(str(path[-1])) if path else None
    return f"; write {{{key}: ...}}" if key and isinstance(got, (str, int, float, list)) else ""


def as_share(got: object, limit: float) -> str:
    """Of a number in place of a share."""
    return "; write 95% or 0.95" if limit == 1 and isinstance(got, (int, float)) and 1 < got <= 100 else ""


def syntax(error: yaml.MarkedYAMLError, text: str) -> str:
    """Of a text that is not YAML."""
    begin, end = error.context_mark or error.problem_mark, error.problem_mark or error.context_mark
    if begin is None or end is None:
        return ""
    problem = error.problem or ""
    flow = problem.startswith("expected ',' or")
    lines = text.splitlines()[begin.line : end.line + 1]
    if flow and (found := next((match for line in lines if (match := _BARE_VARIABLE.search(line))), None)):
        return f'; quote the variable: "${{{found[1]}}}"'
    if flow:
        opened = text[begin.index : begin.index + 1]
        return f"; close the {opened} of line {begin.line + 1}, or put a comma between its entries"
    if "quoted scalar" in (error.context or ""):
        return f"; close the quote of line {begin.line + 1}"
    return next((f"; {mend}" for part, mend in _SYNTAX if part in problem), "")
