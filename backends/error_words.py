"""Words of documented error messages: what a log may repeat of a server's message.

A server may quote a prompt, a header or a key in any message, and logs hold none of these. So only words are kept that
error messages are made of, and numbers of up to seven digits; everything else becomes an ellipsis. What the caller is
told is not shortened here.
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
    encountered endpoint engine enginecore entity error errors event exceed exceeded exceeds exception execute
    exhausted exist existing exists exited expected expired extra fail failed failure feature fetch fewer file files
    filter filtered final finish first flagged for forbidden found free from full function gateway generate
    generated generating generation given gpu guidelines had handle handler has have header high hour hourly http id
    ids illegal image images in incorrect increase increasing index input inputs insufficient internal
    internalservererror invalid is issue it its json kernel key kv large latency later length less limit limited
    limits list load loaded loading long longer lora lost maintenance malformed management many max maximum memory
    message messages metadata method metric min minute minutes missing model models moderation monthly more most
    must name nan network new no none not notfounderror null number object occurred of off on one only oom operation
    or organization our out output over overload overloaded page parameter parameters parse payment pending per
    permission permissions permitted plan please point policy pool port precondition prefill previous process
    processed processing project prompt provided provider proxy queue queued quota rate ratelimiterror reached read
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
_NUMBER = re.compile(r"\d{1,7}(?:[.,]\d{1,3})*%?[.,]?")
_NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PUNCTUATION = frozenset(".,:;!?()[]{}<>=/+-_*'\"`%$#&|")


def known_words(line: str) -> str:
    """The line with an ellipsis in place of what no documented error says."""
    kept = "".join(piece if _is_known(piece) else "…" for piece in _PIECE.findall(line))
    shortened = re.sub(r"…(?:[\s\W]*…)*", "…", kept).strip()
    return shortened if any(map(str.isalnum, shortened)) else ""


def is_known_name(name: str) -> bool:
    """A type or code that consists of such words: `internal_error`, `InternalServerError`."""
    parts = _NAME_PART.findall(name)
    return bool(parts) and all((part.isdigit() and len(part) < 4) or part.lower() in _WORDS for part in parts)


def _is_known(piece: str) -> bool:
    if piece.isspace():
        return True
    if piece[0].isdigit():
        return _NUMBER.fullmatch(piece) is not None
    if piece[0].isalpha():
        return piece.lower() in _WORDS
    return all(character in _PUNCTUATION for character in piece)
