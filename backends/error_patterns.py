"""Kinds of error replies, by the names and words of servers and providers.

Rules:
- The first pattern of the table that fits counts; where none does, the status decides.
- A message may quote a caller. A pattern that blames the endpoint, its account or its model for a 4xx is therefore
  recognized by a name (`code`, `type`) or by the beginning of the message (`\\A`). A pattern that blames the request is
  recognized anywhere: a caller who forges it harms nobody else.
- A 404 that names the configured model is about the model; any other is about an id of the caller. A 404 in no known
  shape is a web server's own: the path is unknown.
- A 403 that speaks of keys, accounts or permissions at once, or comes without words, is about the gateway's key; any
  other is about the request.
- A 429 is about requests or tokens as its names, its words, or else the headers say. More tokens than the limit itself
  are the size of one request, which can never fit.
- Patterns run in linear time, over at most MESSAGE_LIMIT characters.

Sources of the words: tests/backends/replies, one file for each provider and engine.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from backends import rate_limit_headers
from backends.error_body import ErrorBody
from backends.interface import FailureKind


@dataclass(frozen=True, slots=True)
class Pattern:
    """Fits an error of one of the statuses by one of the names, or by its words."""

    kind: FailureKind
    statuses: Collection[int]
    names: frozenset[str]
    words: re.Pattern[str]

    def fits(self, status: int, said: ErrorBody) -> bool:
        if status not in self.statuses:
            return False
        words = self.words.search
        return not self.names.isdisjoint(said.names) or any(map(words, filter(None, (said.words, said.inner))))


def _pattern(kind: FailureKind, statuses: Collection[int], names: str, words: str) -> Pattern:
    return Pattern(kind, frozenset(statuses), frozenset(names.split()), re.compile(words, re.IGNORECASE))


KEY_MARK = "[key]"  # in place of the gateway's key, which no caller knows
_AT_ONCE = 120  # characters of a message; further on, it may quote a caller
_NEVER = r"(?!)"
_BEGINS = r"\A(?:{})"
_CODES_OF_KEY = {401, 407, 408, 429}
_OF_REQUEST = {*range(400, 500), 500} - _CODES_OF_KEY
_OF_ACCOUNT = {*range(400, 500)} - {401, 407, 408}

_CONTENT_FILTER = (
    r"input was flagged|content management policy|violates (?:our )?usage (?:guidelines|polic)|SAFETY_CHECK_TYPE|"
    r"violating our usage policy|rejected by the safety system|PROHIBITED_CONTENT|Responsible AI practices|"
    r"blocked by (?:the )?(?:content|safety|moderation) (?:filter|system|polic)|content exists risk"
)
_CONTEXT = (
    r"maximum context length|maximum model length|longer than the model's context|context window|exceed context limit|"
    r"prompt(?: is)? too long|maximum prompt length|context[ _]length[ _]exceeded|exceeds? the context length|"
    r"reduce the length of the (?:messages|prompt|input)|input (?:length|token count).{0,80}exceeds the maximum|"
    r"exceeds the available context size|should not exceed max_num_tokens|too many tokens: (?!max tokens)|"
    r"`inputs` (?:tokens \+ `max_new_tokens` must be <=|must have less than)|input is too long for|"
    r"exceeds the model's maximum context|exceeds the maximum allowed (?:input )?length"
)
_REQUEST_SIZE = (
    r"\Arequest too large for\b|fewer max_tokens|\A(?:extra usage|usage credits) (?:is|are) required for long context"
)
_NO_MONEY = _BEGINS.format(
    r"your credit balance is too low|you have reached your specified (?:workspace )?api usage limits|"
    r"your newly created teams? do(?:es)?n't have any credits|"
    r"your team .{0,80}has either used all available credits|account .{0,100} is suspended|"
    r"insufficient (?:balance|credits)|"
    r"billing hard limit|budget has been exceeded|this api method requires billing|credit limit exceeded|"
    r"you are using a trial key, which is limited to [\d,]+ api calls / month"
)
_OVERLOADED = _BEGINS.format(
    r"(?:the |this )?(?:model|engine|server|service) is (?:currently |temporarily )?overloaded|server busy|"
    r"service tier capacity exceeded|(?:the )?request queue is full|.{0,40}capacity exceeded"
)
_BAD_KEY = _BEGINS.format(
    r"incorrect api key provided|api key not valid|api key expired|invalid api key|user location is not supported|"
    r"(?:this )?organization has been (?:disabled|restricted)|gemini api free tier is not available"
)
_DENIED = re.compile(
    re.escape(KEY_MARK)
    + r"|\b(?:api[ -]?keys?|tokens?|credentials?|authenticat\w*|(?:un)?authori[sz]\w*|permissions?|not allowed|"
    r"forbidden|access denied|no access|organi[sz]ation|project|subscription|account|team|ip address|billing|"
    r"(?:country|region|territory|location).{0,40}not supported)\b",
    re.IGNORECASE,
)
_MODEL_NAME = r"[`'\"]?[\w./:@-]{1,200}[`'\"]?"
_ABOUT_MODEL = re.compile(
    r"(?:invalid|unknown|unsupported) model\b|model not exist|"
    rf"(?:the )?(?:requested )?(?:model:? )?{_MODEL_NAME}:? is not a valid model|"
    rf"(?:the )?(?:requested )?models?[:/]? ?(?:{_MODEL_NAME}:? )?"
    r"(?:does not exist|not found|is not (?:found|available|supported|loaded)|"
    r"(?:has been|is) (?:deprecated|decommissioned|retired|blocked)|requires terms acceptance)|"
    rf"model: {_MODEL_NAME}\Z|the api deployment|"
    r"(?:the |your )?(?:project|key|team|you)\b.{0,80}(?:not have access to|not allowed to access) (?:the )?model|"
    r"(?:\{'error': ')?/[\w/]{1,60}: invalid model name|"
    r"no endpoints (?:found for|(?:found|available) matching your)\b",
    re.IGNORECASE,
)
_MODEL_NAMES = frozenset(
    "model_not_found invalid_model model_not_available model_not_supported model_decommissioned model_deprecated "
    "modeldeprecated model_terms_required model_permission_blocked_org model_permission_blocked_project "
    "deploymentnotfound key_model_access_denied team_model_access_denied".split()
)
_MODEL_STATUSES = frozenset({400, 401, 403, 404, 410, 422})
_THINGS = (
    r"(?:file|vector[_ ]store|container|assistant|batch|response|conversation|thread|run|item|skill|upload|"
    r"cached ?content|image|memory store|fine[- ]?tun\w{1,10} job)s?"
)
_OWN_CONTENT = re.compile(
    rf"\A(?:the |previous |your )?{_THINGS}\b.{{0,200}}(?:not found|not exist|expired|was deleted|no longer)|"
    rf"\Ano (?:such )?{_THINGS}\b|permission to access the (?:file|cached ?content)|items are not persisted|"
    r"unable to (?:download|fetch) (?:the |an? )?(?:file|image|url|content|media)|"
    r"(?:failed to|cannot|could not|error while|timeout while) (?:download|fetch|load|access)(?:ing)? "
    r"(?:the |an? )?(?:file|image|content|media|url|\[?http)|fetching (?:image|file) failed",
    re.IGNORECASE,
)
_OWN_NAMES = re.compile(
    r"image|(?:file|response|conversation|container|vector_store|thread|item)\w{0,40}_(?:not_found|expired)",
    re.IGNORECASE,
)
_WRONG_PATH = re.compile(
    r"(?:(?:the )?(?:requested )?(?:path|url|route|endpoint|page|resource)(?: was)? )?not found\.?\Z|"
    r"(?-i:File Not Found\Z)|404 page not found|invalid url \(|unknown request url|no route matched|method not allowed|"
    r"cannot (?:post|get|delete) /",
    re.IGNORECASE,
)
_PER_TOKEN = re.compile(
    r"tokens? per (?:min|second|hour|day)|\b[IO]?TP[MDS]\b|token rate limit|tokens? (?:rate )?limit|"
    r"number of (?:\w{1,20} )?tokens|token_count|your token(?:s| usage)",
    re.IGNORECASE,
)
_PER_REQUEST = re.compile(
    r"requests? per (?:min|second|hour|day)|\bRP[MDS]\b|call rate limit|requests rate limit|number of (?:\w{1,20} )?"
    r"requests|free_tier_requests|_requests\b|concurrent (?:requests|connections)|api calls / min|requests/min",
    re.IGNORECASE,
)
_LIMIT_AND_SIZE = re.compile(r"\blimit:? (\d{1,15})\b.{0,60}?\brequested:? (\d{1,15})\b", re.IGNORECASE)
_PROVIDER_PAGE = re.compile(
    r"no healthy upstream|server encountered a temporary error and could not complete|\bcloudflare\b", re.IGNORECASE
)
_UNREACHED = frozenset({520, 521, 522, 523, 525, 526, 527, 530})  # Cloudflare: no answer from the provider's servers

_TABLE = (
    _pattern(
        FailureKind.CONTENT_FILTER,
        (400, 403, 422, 451, 500),
        "content_filter content_policy_violation moderation_blocked responsibleaipolicyviolation safety_violation "
        "image_content_policy_violation guardrail_violation guardrails_violation content_filtered_error",
        _CONTENT_FILTER,
    ),
    _pattern(FailureKind.REQUEST_SIZE, (402, 413, 429), "weight_exceeds_budget", _REQUEST_SIZE),
    _pattern(
        FailureKind.CONTEXT,
        _OF_REQUEST - {402, 403, 404, 405},
        "context_length_exceeded exceed_context_size_error context_window_exceeded model_context_window_exceeded",
        _CONTEXT,
    ),
    _pattern(FailureKind.RATE_LIMITED, (402,), "in_flight_budget_exhausted", _NEVER),
    _pattern(
        FailureKind.QUOTA,
        _OF_ACCOUNT,
        "insufficient_quota billing_not_active billing_hard_limit_reached insufficient_balance billing_error "
        "budget_exceeded credit_limit payment_required account_suspended blocked_api_access",
        _NO_MONEY,
    ),
    _pattern(
        FailureKind.OVERLOADED,
        (429, 498, 500, 502),
        "overloaded overloaded_error engine_overloaded server_overloaded server_is_overloaded slow_down "
        "capacity_exceeded",
        _OVERLOADED,
    ),
    _pattern(FailureKind.AUTH, (400,), "api_key_invalid organization_restricted", _BAD_KEY),
    _pattern(
        FailureKind.PROVIDER, (502, 503), "provider_unavailable", _BEGINS.format("there is no available model provider")
    ),
)
_BY_STATUS = {
    401: FailureKind.AUTH,
    402: FailureKind.QUOTA,
    407: FailureKind.AUTH,
    408: FailureKind.TIMEOUT,
    424: FailureKind.SERVER,  # TGI: the engine failed
    498: FailureKind.OVERLOADED,  # Groq: the capacity of a service tier
    503: FailureKind.OVERLOADED,
    504: FailureKind.TIMEOUT,
    524: FailureKind.TIMEOUT,  # Cloudflare waited 100 s for the first byte, which one long answer can take
    529: FailureKind.OVERLOADED,
    **dict.fromkeys(_UNREACHED, FailureKind.PROVIDER),
}


def kind_of(status: int, headers: Mapping[str, str], said: ErrorBody, models: Collection[str] = ()) -> FailureKind:
    """Kind of an error reply. `models`: names that the configuration asks for. UNSUPPORTED: the path is unknown."""
    known = next((pattern.kind for pattern in _TABLE if pattern.fits(status, said)), None)
    if known is not None:
        return known
    if status == 429:
        return _of_rate_limit(headers, said)
    if status in _MODEL_STATUSES and is_about_model(said):
        return FailureKind.MISCONFIGURED
    if status in (404, 405):
        return _of_not_found(status, said, models)
    if status == 403:
        return _of_forbidden(said)
    return _of_status(status, headers, said)


def _of_status(status: int, headers: Mapping[str, str], said: ErrorBody) -> FailureKind:
    behind = headers.get("server", "").lower().startswith("awselb") or _PROVIDER_PAGE.search(said.page)
    if status in (502, 503) and behind:
        return FailureKind.PROVIDER
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status >= 500:
        return FailureKind.SERVER
    if status < 400:
        return FailureKind.PROTOCOL
    return FailureKind.CONTENT if _is_own_content(said) else FailureKind.CLIENT


def is_about_model(said: ErrorBody) -> bool:
    """True if the error names the model, by its parameter, its code, or the beginning of its message."""
    if said.param is not None and said.param != "model":
        return False
    return said.param == "model" or not _MODEL_NAMES.isdisjoint(said.names) or opens_with_model(said)


def opens_with_model(said: ErrorBody) -> bool:
    """True if the message begins with a complaint about a model, and so quotes nothing but a name."""
    return _ABOUT_MODEL.match(said.words) is not None


def _is_own_content(said: ErrorBody) -> bool:
    """True for an id that the caller names, or a medium that the caller refers to."""
    code = said.code if isinstance(said.code, str) else ""
    return _OWN_CONTENT.search(said.words) is not None or _OWN_NAMES.search(code) is not None


def _of_not_found(status: int, said: ErrorBody, models: Collection[str]) -> FailureKind:
    if status == 405 or _WRONG_PATH.match(said.words):
        return FailureKind.UNSUPPORTED
    if said.param is not None or _is_own_content(said):
        return FailureKind.CONTENT
    if _holds_any(said.words, models):
        return FailureKind.MISCONFIGURED
    if not said.names:
        return FailureKind.UNSUPPORTED  # a web server's own page
    lacks = said.words.startswith("No endpoints found that")  # OpenRouter: no provider has the features of the request
    return FailureKind.CLIENT if lacks else FailureKind.CONTENT


def _holds_any(message: str, names: Collection[str]) -> bool:
    return any(re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", message) for name in names if name)


def _of_forbidden(said: ErrorBody) -> FailureKind:
    if _OWN_CONTENT.search(said.words):
        return FailureKind.CONTENT
    if not said.words:
        return FailureKind.AUTH  # a web server's own page
    told = " ".join((said.words[:_AT_ONCE], *said.names)).replace("_", " ")
    return FailureKind.AUTH if _DENIED.search(told) else FailureKind.CLIENT


def _of_rate_limit(headers: Mapping[str, str], said: ErrorBody) -> FailureKind:
    sizes = _LIMIT_AND_SIZE.search(said.words)
    if sizes is not None and int(sizes[2]) > int(sizes[1]):
        return FailureKind.REQUEST_SIZE
    if said.metrics and re.search(r"\blimit: 0\b", said.words):  # Gemini: nothing of this model without paying
        return FailureKind.QUOTA
    kind = _limit_of(headers, said)
    would = kind is FailureKind.TOKEN_RATE and said.words.startswith("This request would exceed")  # Anthropic
    grows = "usage increase rate" in said.words  # a limit on growth, below the limit of the headers
    return FailureKind.REQUEST_SIZE if would and not grows and rate_limit_headers.has_all_tokens(headers) else kind


def _limit_of(headers: Mapping[str, str], said: ErrorBody) -> FailureKind:
    told = f"{said.metrics or said.words} {said.inner}"
    by_words = {
        FailureKind.TOKEN_RATE: "tokens" in said.names or _PER_TOKEN.search(told) is not None,
        FailureKind.REQUEST_RATE: "requests" in said.names or _PER_REQUEST.search(told) is not None,
    }
    kinds = [kind for kind, fits in by_words.items() if fits]
    if len(kinds) == 1:
        return kinds[0]
    spent = rate_limit_headers.spent(headers)
    if "requests" in spent:
        return FailureKind.REQUEST_RATE
    return FailureKind.TOKEN_RATE if "tokens" in spent else FailureKind.RATE_LIMITED
