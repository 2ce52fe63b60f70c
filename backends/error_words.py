"""Words of documented error messages: what a log may repeat of a server's message.

A server may quote a prompt, a header or a key in any message, and logs hold none of these. What the caller is told is
not shortened here. Rules:
- Words are kept that error messages are made of; everything else becomes an ellipsis.
- A number is kept beside its unit or name alone (`Limit 3`, `20s`), and never beside another number: an account, a card
  or a key is written in groups.
- Nothing is kept after the beginning of a quotation.
"""

from __future__ import annotations

import re

_WORDS = frozenset(
    """
    a abort aborted above accept accepted access account active actual adapter after again all allocate allowed
    already an and any api are argument arguments as assertion assistant at attempt audio auth authentication
    authorization available average azure backend bad badrequesterror balance be because been before below billing
    block blocked body break broke broken budget busy by bytes call called calls can cancelled cannot capacity
    certificate channel character characters check checkpoint choices client closed code cold compatible completion
    completions compute concurrency concurrent configuration configured connect connection contact container
    contains content context continue core could country created credential credentials credit credits cuda current
    currently daily data day dead deadline decode default demand denied depleted deployment detail details device
    did died disabled disk do does doesn't done down driver dtype due during each embedding embeddings empty
    encountered endpoint engine enginecore entity errno error errors event exceed exceeded exceeds exception execute
    exhausted exist existing exists exited expected expired extra fail failed failure feature fetch fewer file files
    filter filtered final finish first flagged for forbidden found free from full function gateway generate
    generated generating generation gib given gpu guidelines had handle handler has have header high hour hourly http id
    ids illegal image images in incorrect increase increasing index input inputs insufficient internal
    internalservererror invalid is issue it its json kernel key kv large latency later length less limit limited
    limits list load loaded loading long longer lora lost maintenance malformed management many max maximum memory
    message messages metadata method metric mib min minute minutes missing model models moderation monthly more most ms
    must name nan network new no none not notfounderror null number object occurred of off on one only oom operation
    or organization our out output over overload overloaded page parameter parameters parse payment pending per
    permission permissions permitted plan please point policy pool port precondition prefill previous process
    processed processing project prompt provided provider proxy queue queued quota rank rate ratelimiterror reached read
    ready reason received reduce refer region rejected remaining replica request requested requests required
    requires reset resource resources response responses restart result retry return returned role root route rpm
    running runtime runtimeerror s safety schema second seconds see send sent sequence server servers service
    serviceunavailable session shape should shut size slow so some something space spend spending spent stalled
    start started starting state status stop stopped store stream streaming structure such support supported
    suspended system tasks team temperature temporarily tensor terminated text than that the there they this thread
    throttled throttling tier time timed timeout to token tokenizer tokens too tool tools top total tpm traffic
    transport trial try trying type unable unauthorized unavailable under unexpected unhealthy unknown unprocessable
    unreachable unsupported until up upgrade upstream url usage use used user using valid validation value values
    vector version violation waiting warming was watchdog we weights went were when while will window with within
    without work worker workers would write wrong yet you your
    """.split()
)
_PIECE = re.compile(r"[A-Za-z']+|\d[\d.,%]*|\s+|[^\sA-Za-z\d']+")
_NUMBER = re.compile(r"(?:\d{1,7}|\d{1,3}(?:,\d{3}){1,2})(?:\.\d{1,3})?%?[.,]?")
_CODE = re.compile(r"\d{1,3}[.,]?")

# A name in backquotes is no quotation, nor is an apostrophe.
_QUOTATION = re.compile(
    r"(?<![A-Za-z])'|'(?!(?:s|t|re|ve|ll|d|m)\b)|[\"“”„‘’‚«»‹›]|`(?![\w./:\[\]-]{1,60}`)(?<![\w./:\]-]`)"
    r"|(?:prompts?|requests?|inputs?|provided)\s?[:=]",
    re.IGNORECASE,
)
_NAMES = "limit limited maximum max used requested tokens token length budget bytes requests calls attempts retries"
_CODE_NAMES = "status code http errno error rank worker attempt device gpu"  # of numbers up to three digits
_UNITS = "s ms m h sec second seconds min minute minutes hour hours day days kib mib gib kb mb gb"
_BESIDE = 40  # characters around a number that are looked at


def _before(names: str) -> re.Pattern[str]:
    """Pattern of the text before a number that one of these names announces."""
    words = names.replace(" ", "|")
    return re.compile(rf"(?<![A-Za-z])(?:{words})[\s:=()\[\]_-]{{0,4}}(?:(?:is|was|of|(?:up )?to)\s)?$", re.IGNORECASE)


def _after(names: str) -> re.Pattern[str]:
    words = names.replace(" ", "|")
    return re.compile(rf"[\s-]?(?:{words})(?![A-Za-z_'-])", re.IGNORECASE)


_NAME_BEFORE, _CODE_BEFORE = _before(_NAMES), _before(_CODE_NAMES)
_UNIT_AFTER, _CODE_AFTER = _after(f"{_NAMES} {_UNITS}"), _after(_CODE_NAMES)
_NUMBER_BEFORE = re.compile(r"\d[^A-Za-z]*$")
_NUMBER_AFTER = re.compile(r"[^A-Za-z]*\d")
_WITHIN_NAME = re.compile(r"[\w-](?<!\d[hm])$")  # the number is a part of an id; not in 9m38s
_NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PUNCTUATION = frozenset(".,:;!?()[]{}<>=/+-_*'\"`%$#&|")


def known_words(line: str) -> str:
    """The line with an ellipsis in place of what no documented error says."""
    if quotation := _QUOTATION.search(line):
        line = line[: quotation.end() - 1] + "…"
    kept = "".join(piece[0] if _is_known(line, piece) else "…" for piece in _PIECE.finditer(line))
    shortened = re.sub(r"…(?:[\s\W]*…)*", "…", kept).strip()
    return shortened if any(map(str.isalnum, shortened)) else ""


def is_known_name(name: str) -> bool:
    """A type or code that consists of such words: `internal_error`, `InternalServerError`."""
    parts = _NAME_PART.findall(name)
    return bool(parts) and all((part.isdigit() and len(part) < 4) or part.lower() in _WORDS for part in parts)


def _is_known(line: str, found: re.Match[str]) -> bool:
    piece = found[0]
    if piece.isspace():
        return True
    if piece[0].isdigit():
        return _is_measure(piece, line[max(found.start() - _BESIDE, 0) : found.start()], line[found.end() :][:_BESIDE])
    if piece[0].isalpha():
        return piece.lower() in _WORDS or (piece in ("h", "m") and line[found.start() - 1].isdigit())  # 9m38s
    return all(character in _PUNCTUATION for character in piece)


def _is_measure(number: str, before: str, after: str) -> bool:
    """True for a number with a unit or name, and without another number beside it."""
    if not _NUMBER.fullmatch(number) or _NUMBER_BEFORE.search(before) or _NUMBER_AFTER.match(after):
        return False
    if _NAME_BEFORE.search(before) or (_CODE.fullmatch(number) and _CODE_BEFORE.search(before)):
        return True
    if _WITHIN_NAME.search(before):
        return False
    has_unit = "%" in number or _UNIT_AFTER.match(after)
    return bool(has_unit or (_CODE.fullmatch(number) and _CODE_AFTER.match(after)))
