"""Removes from a server's message what no caller may read: URLs, hosts, addresses, accounts and keys; of failures, also
paths of files and what follows the first lines.

Little else is removed: the message should help the caller. Text is cut to MESSAGE_LIMIT, and patterns run in linear
time.

An API key is told from a placeholder (`is_secret`). SDKs demand a key, so servers without keys are configured with a
word: `none`, `EMPTY`, `test`, `x`. Masking such a word would rewrite whatever contains the word, and protect nothing.

A log may repeat the words of documented error messages alone. A server may quote a prompt, a header or a key in any
message, and logs hold none of these. What the caller is told is not shortened here. Rules:
- Words are kept that error messages are made of; everything else becomes an ellipsis.
- A number is kept beside its unit or name alone (`Limit 3`, `20s`), and never beside another number: an account, a card
  or a key is written in groups.
- Nothing is kept after the beginning of a quotation.
"""

from __future__ import annotations

import re

from backends.error_body import MESSAGE_LIMIT
from backends.error_patterns import KEY_MARK

SHORTEST = 16  # characters of a key without a known prefix; the APIs of catalog.py give 32 or more
# OpenAI, Anthropic, DeepSeek, OpenRouter, LiteLLM (sk), Groq, xAI, Fireworks, Hugging Face, NVIDIA, Google
_PREFIXED = re.compile(r"(?:(?:sk|pk|rk|gsk|xai|fw|hf|nvapi)[-_]|AIza)\S{4,}")


def is_secret(value: str) -> bool:
    """True for an API key; False for a placeholder."""
    return len(value) >= SHORTEST or _PREFIXED.fullmatch(value) is not None


# Control characters, escape sequences of terminals, and Unicode characters that reverse or hide text.
_CONTROL = re.compile(
    r"(?:\x1b\[[0-9;?]{0,20}[A-Za-z]|[\x00-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff])+"
)
_START = r"(?<![\w.-])"  # of a name: else each letter is tried, in square time
_NO_HOST = (  # a name of a limit before its number
    r"(?!(?i:rpm|tpm|rpd|tpd|rps|itpm|otpm|limit|max\w*|min\w*|used|usage|requested|requests?|remaining|current|left|"
    r"tokens?|count|size|length|len|budget|code|status|error|line|step|rank|timeout|id|retry\w*):)"
)
_SCRUBS = (
    (re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{1,20}://[^\s'\"`<>)\]}]+"), "[url]"),
    (re.compile(r"(?i)\bbearer\s+\S+"), "[key]"),
    (re.compile(r"\b(?:sk|pk|rk|gsk|xai|fw|hf|key|api|nvapi|AIza)[-_][A-Za-z0-9_*.-]{8,}"), "[key]"),
    (re.compile(r"\bAIza[A-Za-z0-9_-]{20,}"), "[key]"),
    (re.compile(r"\b(?:gh[oprsu]|github_pat|glpat|xox[a-z]|tgp|r8|dop|ya29)[_.-][\w.-]{10,}"), "[key]"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), "[key]"),
    (re.compile(r"\beyJ[\w-]{8,}(?:\.[\w-]+){0,2}"), "[key]"),  # a JSON web token
    (
        re.compile(  # `tokens: 128000` is none
            r"(?i)\b((?:pass(?:word|wd)|pwd|secret|(?:api|access|private|x-api)[ _-]?key|token|credentials?)['\"]?"
            r"\s{0,3}[=:]\s{0,3}['\"]?)(?!\[)(?=[^\s'\",;)&]{0,80}[a-z])(?=[^\s'\",;)&]{0,80}\d)[^\s'\",;)&]{6,}"
        ),
        r"\1[key]",
    ),
    (re.compile(r"\b(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{32,}"), "[key]"),  # not a UUID, not a snake_case name
    (re.compile(r"\b(?:org|proj|team)[-_](?=[A-Za-z]*\d|[A-Za-z]{16})[A-Za-z0-9]{6,}"), "[account]"),
    (re.compile(r"(?i)\b((?:team|org|organization|api key id):? \(?)[0-9a-f]{8}-[0-9a-f-]{27}"), r"\1[account]"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?"), "[address]"),
    (re.compile(r"\[[0-9a-fA-F]*:[0-9a-fA-F:.]+\](?::\d+)?"), "[address]"),
    (re.compile(_START + _NO_HOST + r"[A-Za-z][A-Za-z0-9.-]*:\d{4,5}\b"), "[address]"),  # host:port
    (re.compile(_START + r"[A-Za-z][A-Za-z0-9]*(?:[.-][A-Za-z0-9]+){1,20}:\d{2,3}\b"), "[address]"),
    (
        re.compile(r"(?i)" + _START + r"(?:[a-z0-9-]+\.)+(?:com|net|org|io|ai|dev|cloud|local|internal|svc|lan)\b"),
        "[address]",
    ),
)


_FEWEST, _MOST_WORDS = 3, 500  # letters of a line that says something; characters of all
_TRACE = re.compile(r"Traceback \(most recent call last\)|\bFile \"|\n\s+at |\bat 0x[0-9a-f]+", re.IGNORECASE)
_NAME = r"['\"]?(?=[\w.-]{0,60}[\d.-])\w[\w.-]{1,100}"  # of one machine: a word has no digit, hyphen or dot
_IPV6 = re.compile(  # a time of day is none
    r"(?i)(?<![\w:.])(?=[0-9a-f:]{0,40}(?:::|[a-f]))(?:[0-9a-f]{1,4}:){1,7}(?::?[0-9a-f]{1,4}){1,7}(?![\w:])"
)
_SCRUBS_OF_FAILURES = (
    (re.compile(r"\barn:[\w-]+(?::[^\s:,;'\"]{0,200}){2,6}"), "[account]"),
    (re.compile(r"[\w.+-]{1,64}@(?:\[address\]|[\w-]+(?:\.[\w-]+)+)"), "[account]"),
    (
        re.compile(r"(?i)/?\b(?:subscriptions|resourcegroups|accounts|organizations|projects|tenants)/[^\s'\",;)]+"),
        "[account]",
    ),
    (
        re.compile(
            r"(?i)\b((?:account|subscription|tenant|customer|project|organi[sz]ation|org|team|user|workspace)"
            r"[ _-]?(?:id|number|name)?[ :=]{1,3}['\"(]?)(?=[\w-]{0,60}\d)[\w-]{4,64}"
        ),
        r"\1[account]",
    ),
    (re.compile(r"\b(?:acct|cus|user|usr|wrkspc|ws|sub|tenant|org|proj|team)[-_](?=\w{0,40}\d)\w{6,64}"), "[account]"),
    (re.compile(r"(?i)\bip-\d{1,3}(?:-\d{1,3}){3}\b"), "[address]"),
    (re.compile(r"\b[a-z][a-z0-9]*(?:-[a-z0-9]+){0,10}-[a-f0-9]{6,10}-[a-z0-9]{5}\b"), "[address]"),  # a pod
    (
        re.compile(
            r"(?i)"
            + _START
            + r"(?=(?:[a-z0-9]+-){0,10}(?:host|node|server|pod|vm|gpu|worker|engine|backend|prod|staging|db|"
            r"svc|box|rack|cluster|vllm|sglang|triton|ray)(?![a-z]))[a-z0-9]+(?:-[a-z0-9]+){1,10}(?:\.[a-z0-9-]+){0,10}(?![\w-])"
        ),
        "[address]",
    ),
    (re.compile(r"(?i)\blocalhost\b(?::\d+)?"), "[address]"),
    (
        re.compile(
            r"(?i)" + _START + r"(?:[a-z0-9-]+\.){1,20}"
            r"(?:corp|intra|intranet|home|consul|test|cluster|localdomain|private|prod|staging|k8s|default|pod|nip|co|de|eu)\b"
        ),
        "[address]",
    ),
    (
        re.compile(
            r"(?i)\b((?:host(?:name)?|server|node|pod|upstream|peer|resolve|lookup|dial(?:ing)?(?: tcp)?|"
            r"connect(?:ion|ed|ing)? (?:to|with|from)(?: (?:host|server|upstream))?)[ :=]{1,3})" + _NAME
        ),
        r"\1[address]",
    ),
    (re.compile(r"(?<![\w.])(?:/[\w.@+-]+){2,30}/?"), "[path]"),
    (re.compile(r"\b[A-Za-z]:\\[^\s'\"]+"), "[path]"),
)


def scrubbed_words(message: str, secret: str = "") -> str:
    """The first words of a server's message about its limits, its load or its failure, for a caller; empty: none say
    anything."""
    beginning = message[:MESSAGE_LIMIT]
    if (trace := _TRACE.search(beginning)) is not None:
        beginning = beginning[: trace.start()]
    text = scrub(_IPV6.sub("[address]", beginning), secret)
    for pattern, mark in _SCRUBS_OF_FAILURES:
        text = pattern.sub(mark, text)
    text = " ".join(text.split()).strip(" :-")
    if len(text) > _MOST_WORDS:
        text = text[:_MOST_WORDS].rsplit(" ", 1)[0] + "…"
    if sum(map(str.isalpha, text)) < _FEWEST:
        return ""
    return text if text[-1] in ".!?…。！？" else f"{text}."


def scrub(text: str, secret: str = "") -> str:
    """Remove URLs, hosts, addresses and keys from `text`; return a single line."""
    text = _CONTROL.sub(" ", text[:MESSAGE_LIMIT])
    if is_secret(secret):
        text = text.replace(secret, KEY_MARK)
    for pattern, mark in _SCRUBS:
        text = pattern.sub(mark, text)
    return text


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
