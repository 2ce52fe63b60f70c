"""Removes from a server's message what no caller may read: URLs, hosts, addresses, accounts and keys; of failures, also
paths of files and what follows the first lines.

Little else is removed: the message should help the caller. Text is cut to MESSAGE_LIMIT, and patterns run in linear
time.
"""

from __future__ import annotations

import re

from backends.error_body import MESSAGE_LIMIT
from backends.error_patterns import KEY_MARK
from backends.secrets import is_secret

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
