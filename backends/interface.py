"""Interface of backends: values in, bytes and events out.

A backend speaks a dialect and does no I/O: `call` turns a request into bytes to send, a `Tap` reads the reply,
`failure` gives an error reply its meaning. Sockets are in `backends.http` alone, where every foreign exception
becomes a `Failure`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec

from backends.body_changes import BodyChange
from backends.facts.model_facts import Facts


class Operation(Enum):
    """Operation of a request; the value is the path."""

    __hash__ = object.__hash__  # each is one object, and is looked up in sets by every request; Enum's own is Python

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    RESPONSES = "/v1/responses"
    COMPACT = "/v1/responses/compact"
    INPUT_TOKENS = "/v1/responses/input_tokens"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/v1/rerank"
    SCORE = "/v1/score"
    TOKENIZE = "/tokenize"


GENERATING = frozenset(  # operations whose answers hold tokens of output
    {Operation.CHAT, Operation.COMPLETION, Operation.RESPONSES, Operation.COMPACT, Operation.MESSAGES}
)
TOKEN_COUNTS = frozenset({Operation.COUNT_TOKENS, Operation.INPUT_TOKENS})  # operations that ask for a count alone


@dataclass(slots=True)
class BackendRequest:
    """A request to be sent on. `body` is the parsed body and must not be changed in place. Values within arrays and
    objects may be `msgspec.Raw`: strict JSON, to be sent as written."""

    operation: Operation
    body: Mapping[str, Any]
    model: str  # the model's name at the servers of this backend
    stream: bool
    max_tokens: int | None = None  # the route's cap or default, to be set where the caller's is absent or larger
    request_id: str = ""
    traceparent: str = ""
    cache_salt: str = ""  # separates prompt caches of tenants; the caller's own salt is never sent
    priority: int | None = None
    session_id: str = ""  # by which the engine's cache events name the request
    tracestate: str = ""
    baggage: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)  # the caller's, of the operation's dialect
    model_is_callers: bool = False  # no name of the configuration: the caller's to get right
    changes: tuple[BodyChange, ...] = ()  # applied to the body for the server: lessons of its refusals


def plain(value: Any) -> Any:
    """A value of a body without `Raw` JSON."""
    return msgspec.json.decode(msgspec.json.encode(value))


@dataclass(slots=True)
class HttpCall:
    """An HTTP/1.1 request. `headers` must not hold host or content-length: the connection pool writes both."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class FailureKind(Enum):
    """Meaning of a reply, an exception or a timeout. The table in `policies.blame`, keyed by these values, decides
    blame and consequences."""

    CONNECT = "connect"  # nothing was sent
    UNRESOLVED = "unresolved"  # nothing was sent: the DNS did not answer
    RESET = "reset"  # the connection died before the reply was complete
    TIMEOUT = "timeout"
    PROTOCOL = "protocol"  # the reply violates the dialect
    SERVER = "server"  # a 5xx
    PROVIDER = "provider"  # a 5xx that speaks of the whole provider
    OVERLOADED = "overloaded"  # 503, 529
    QUEUE_LIMIT = "queue_limit"  # 429, 503 of an engine at its request limit
    RATE_LIMITED = "rate_limited"  # 429 without a named limit
    REQUEST_RATE = "request_rate"  # 429: the account's requests are spent
    TOKEN_RATE = "token_rate"  # 429: the account's tokens are spent
    REQUEST_SIZE = "request_size"  # 402, 413, 429: this one request is larger than the account's limit
    AUTH = "auth"  # 401, 403 of the backend: our key, never the caller's fault
    MISCONFIGURED = "misconfigured"  # the model name or path of our configuration is unknown to the server
    QUOTA = "quota"  # our account is empty: nothing changes until somebody pays
    UNSUPPORTED = "unsupported"  # the server knows no such operation
    UNFIT = "unfit"  # 400, 422: the form is at fault in which the gateway has asked, or the server lacks a feature
    CLIENT = "client"  # 400, 413, 422 ...: the request's own fault
    CONTEXT = "context"  # the request exceeds the model's context window
    CONTENT_FILTER = "content_filter"  # the content of the request is refused
    CONTENT = "content"  # a file, response or other id of the caller is unknown there
    CALLER_CREDENTIAL = "caller_credential"  # of the caller, or the account behind it: the caller's to mend
    GATEWAY = "gateway"  # our own fault: a valid reply that the gateway cannot translate or read


RATE_LIMITS = frozenset({FailureKind.RATE_LIMITED, FailureKind.REQUEST_RATE, FailureKind.TOKEN_RATE})
OF_REQUEST = frozenset(  # the request's own fault: another server of the same kind would answer alike
    {
        FailureKind.CLIENT,
        FailureKind.CONTEXT,
        FailureKind.CONTENT_FILTER,
        FailureKind.CONTENT,
        FailureKind.REQUEST_SIZE,
        FailureKind.CALLER_CREDENTIAL,
    }
)


class Contact(Enum):
    """Progress of a failed request on its way to the server."""

    MADE = "made"  # there was a connection, or nothing is known
    FAILED = "failed"  # no connection: refused, unroutable, or closed while being set up
    UNTRIED = "untried"  # the name, or the proxy, led nowhere


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason of a failed attempt, independent of the dialect.

    `message`, `type`, `code`, `param` follow OpenAI and are safe to show to a caller: no key, host name or server
    banner. `cause` is safe to log: no key, and no text of a prompt.
    """

    kind: FailureKind
    message: str
    status: int = 502
    type: str = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None  # s, as the server asked; not yet clamped
    cause: str = field(default="", compare=False)  # the operator's line; equal failures look the same to a caller
    contact: Contact = field(default=Contact.MADE, compare=False)
    words: str = field(default="", compare=False)  # of the server, scrubbed: part of `message`, or of none

    @property
    def said(self) -> str:
        """For the Record and the log: never the words of a caller, which a server's refusal may quote."""
        return self.cause or (self.message if self.status >= 500 else f"{self.status} {self.kind.value}")

    @property
    def retryable(self) -> bool:
        """Another endpoint might do better."""
        return self.kind not in OF_REQUEST


@dataclass(slots=True)
class Usage:
    """Tokens as reported by the engine, of all that is billed; None if not reported. `compacted`: with those of a
    compaction, which the provider has generated of a longer prompt before the answer."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None  # of the prompt, read from a cache
    cache_write: int | None = None  # of the prompt, written into a cache
    cache_write_1h: int | None = None  # of these, to be kept for an hour or longer
    reasoning: int | None = None  # of the completion
    compacted: bool = False


@dataclass(slots=True)
class EngineTimes:
    """Times of the request as reported by the engine (vLLM --enable-per-request-metrics), seconds."""

    queue: float | None = None  # until scheduled
    prefill: float | None = None  # from scheduling to the first token
    mean_itl: float | None = None
    ttft: float | None = None  # from the engine's queue to the first token


LONGEST_SPEED = 32  # characters


@dataclass(slots=True, eq=False)
class ReplyFacts:
    """Members of a reply for traces, as written by the server: of any type."""

    id: Any = None
    service_tier: Any = None  # speed of an answer, and its price, by the server's name
    finish_reasons: dict[int, Any] = field(default_factory=dict)  # by choice
    signatures: list[str] = field(default_factory=list)  # of reasoning, which only its maker accepts
    signed: int = 0  # characters of these

    @property
    def speed(self) -> str:
        """Empty: not reported."""
        return self.service_tier[:LONGEST_SPEED] if isinstance(self.service_tier, str) else ""


class Tap(Protocol):
    """Reads a response body in passing, and never changes or delays a byte."""

    tokens: int  # events with output so far: the token count until usage says better
    text_bytes: int  # of output so far, as far as it is text
    reasoning_begun: bool  # output of reasoning was seen
    answer_begun: bool  # output of the answer itself was seen
    usage: Usage
    times: EngineTimes
    facts: ReplyFacts
    ended: bool  # finish_reason or [DONE] was seen (streams); the whole body parsed (not streamed)
    missing: bytes  # the last event of a stream, until seen
    terminated: bool  # the last event of a stream was seen: [DONE], message_stop, response.completed
    failure: Failure | None  # an error event
    strict: bool  # an event that is no JSON ends the stream, wherever it may have held text
    junk: int  # events so far that are no JSON; to be dropped unless the stream is spoiled
    is_token: bool  # the latest read is whole events, each of which adds a text and nothing else
    spoiled: bool  # an event that must not be relayed was seen: the stream's last read
    rest: bytes  # of a spoiled read: the end of an event too large to be kept
    sound: bytes  # of a spoiled read: the complete events before, and after `rest`
    error_event: bytes  # of a spoiled read: the backend's own error event, if there is one

    def feed(self, data: bytes) -> bool:
        """Read bytes of the body. True: output among the bytes, of reasoning or of the answer."""

    def close(self) -> None:
        """The body is complete."""


class Assembler(Protocol):
    """Puts the events of a stream together into the JSON that the server sends whole."""

    obstacle: str  # the reason for which there will be no whole answer; empty: none so far

    @property
    def difference(self) -> str:
        """The first way in which the answer may differ from the server's own whole one, the obstacle included."""

    @property
    def of_calls(self) -> bool:
        """All differences show in answers with tool calls alone."""

    @property
    def held_bytes(self) -> int: ...

    def feed(self, data: bytes) -> None:
        """Read bytes of the stream, torn anywhere. Raises nothing: see `obstacle`."""

    def whole(self, counted: Callable[[], tuple[int, int]] | None = None) -> bytes:
        """The JSON, once the body is complete. `counted`: tokens of prompt and answer, where no usage came. Raises
        `backends.stream.assembly.Unassembled`, a ValueError."""


class Backend(Protocol):
    """A dialect, configured for a pool."""

    kind: str
    native: frozenset[Operation]  # spoken without translation
    local: bool  # an engine whose queue and cache can be modelled, as opposed to an API
    secret: bytes  # our key: not to be passed on to callers; empty: there is none
    refuses_models: bool  # a request for a model that the server does not serve
    salted: bool  # keeps the caches of different `cache_salt`s apart
    keyed_by_callers: bool = False  # sends the caller's own key: see `with_key`
    reads_attribution: bool = False  # excludes Claude Code's attribution line from caching

    def call(self, forward: BackendRequest) -> HttpCall: ...

    def facts(self, model: str) -> Facts:
        """Facts of `model` at the servers: by the rows, with the configuration above them."""
        return Facts()

    def with_key(self, header: str, key: str) -> Backend:
        """The same dialect with a caller's own key as its secret. `header`: in which the caller has sent the key."""
        return self

    def lost(self, forward: BackendRequest) -> tuple[str, ...]:
        """Caller's members dropped by the configuration or for lack of room under the output cap."""
        return ()

    def tap(self, forward: BackendRequest) -> Tap: ...

    def assembly_obstacle(self, forward: BackendRequest) -> str:
        """The reason for which the whole answer to the request cannot be put together, exactly, of the stream that
        comes with `stream=True`; empty: it can."""
        return "the dialect"

    def assembler(self, forward: BackendRequest) -> Assembler:
        """Called without an obstacle. `forward` may have either value of `stream`."""
        raise NotImplementedError

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> Failure:
        """The meaning of a non-2xx reply. Header names are lower case."""

    def obstacle(self, forward: BackendRequest, tokens: int) -> str:
        """Reason why an answer broken after `tokens` cannot be continued; empty: a server can continue."""
        return "the dialect"

    def continued(self, forward: BackendRequest, text: str, tokens: int) -> BackendRequest:
        """Request for the rest of an answer that begins with `text`. Called without an obstacle for the same `tokens`.

        `tokens`: of the text so far, counted (`count_text`) or an upper bound, for they come off the caller's limits: a
        number too small would let the whole answer exceed them.
        """
        return forward

    def count_prompt(self, forward: BackendRequest) -> HttpCall | None:
        """Request for the number of prompt tokens: a JSON object with `count`."""
        return None

    def count_text(self, forward: BackendRequest, text: str) -> HttpCall | None:
        """Request for the tokens of a text, answered as `count_prompt`; None: no server counts, or no limit asks for
        the number."""
        return None

    def stored(self, method: str, path: str) -> HttpCall:
        """Request about a stored response, without a body."""
        return HttpCall(method, path)

    def probe(self) -> HttpCall | None:
        """Cheap health request; None: only real traffic shows the server's health."""
        return None

    def load(self) -> HttpCall | None:
        """Request for the page read by `read_load`."""
        return None

    def read_load(self, body: bytes) -> Mapping[str, float | None]:
        """Fields of policies.fleet.engine_load.EngineLoad by name (the packages do not know each other)."""
        return {}

    def read_adapters(self, body: bytes) -> tuple[tuple[str, ...], int | None]:
        """Configured LoRA adapters of running requests, and number of adapters held at a time (None: not told), by the
        page of `load`."""
        return (), None

    def read_model(self, body: bytes) -> str:
        """The served model as named in the page of `load`; empty: not named."""
        return ""

    def listing(self) -> HttpCall:
        """Request for the list of models, with the pool's credential: cheap, and refused where the credential is."""
        return HttpCall("GET", "/v1/models")

    def other_ranks(self, body: bytes) -> str:
        """The data-parallel ranks in a `load` page that lacks the configured rank: "ranks 4..7"; empty: the rank is
        listed, or none is configured."""
        return ""

    def wake(self) -> HttpCall | None:
        """Request that wakes a sleeping engine; None: engines of this kind do not sleep."""
        return None

    def models(self) -> HttpCall | None:
        """Request for the names of all served models, read by `read_models`; None: a request may name any model."""
        return None

    def read_models(self, body: bytes) -> frozenset[str]:
        """Empty: not to be read."""
        return frozenset()


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """Configuration of a backend."""

    kind: str
    model: str
    api_key: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)  # extra, from config
    query: Mapping[str, str] = field(default_factory=dict)  # added to the URL of every call of the API
    rename: Mapping[str, str] = field(default_factory=dict)  # parameters of the body, by the name before
    drop: frozenset[str] = frozenset()  # parameters of the body
    dp_rank: int | None = None  # data-parallel rank of the server
    prompt_caching: bool = True  # mark what the provider's cache is to hold
    adapters: frozenset[str] = frozenset()  # LoRA adapters, as the servers know them
    edition: int = 0  # of the facts
    caller_keys: bool = False  # each caller's own key is sent, in place of `api_key`
    api: str = ""  # row of the API's facts; empty: that of the kind
    accepts: Mapping[str, Any] = field(default_factory=dict)  # facts in place of those of the rows
    key_header: str = ""  # of the key; empty: the dialect's own

    def target(self, path: str) -> str:
        """`path` with the configured query parameters."""
        if not self.query:
            return path
        return f"{path}{'&' if '?' in path else '?'}{urlencode(self.query)}"

    def adapted(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body with parameters renamed and dropped. Of two spellings in a body, the servers' own counts."""
        for name, known in self.rename.items():
            if name in body:
                value = body.pop(name)
                body.setdefault(known, value)
        for name in self.drop:
            body.pop(name, None)
        return body
