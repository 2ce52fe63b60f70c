"""What a backend is: values in, bytes and events out.

A backend speaks one dialect and does no I/O: `call` turns a request into bytes to send,
a `Tap` reads what comes back, `failure` gives an error reply its meaning. The only sockets
are in `transport`, which maps every foreign exception to a `Failure` once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol


class Operation(Enum):
    """What the caller asked for; the value is the OpenAI path."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


class BackendRequest(NamedTuple):
    """A request to be sent on. `body` is what was parsed, and is not to be changed in place: its members are values,
    but for what lies within arrays and objects, which may be `msgspec.Raw`: strict JSON, to be sent as it is."""

    operation: Operation
    body: Mapping[str, Any]
    model: str  # the name that this backend's servers know
    stream: bool
    max_tokens: int | None = None  # the route's cap or default, to be set where the caller's is absent or larger
    request_id: str = ""
    traceparent: str = ""
    cache_salt: str = ""  # whose prompts may be found in each other's cache; the caller's own is never sent
    priority: int | None = None
    session_id: str = ""  # by which the engine's cache events name the request
    tracestate: str = ""


class HttpCall(NamedTuple):
    """One HTTP/1.1 request. `headers` must not hold host or content-length: transport writes them."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    fixed: str = ""  # header lines that are the same for every call, as `backends.http.headers.lines` writes them


class FailureKind(Enum):
    CONNECT = "connect"  # nothing was sent
    RESET = "reset"  # the connection died before the reply was complete
    TIMEOUT = "timeout"
    PROTOCOL = "protocol"  # what came back is not what the dialect allows
    RATE_LIMITED = "rate_limited"  # 429
    OVERLOADED = "overloaded"  # 503, 529
    SERVER = "server"  # another 5xx
    AUTH = "auth"  # 401, 403 of the backend: our key, never the caller's fault
    CLIENT = "client"  # 400, 404, 413, 422 ...: the request's own fault


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt did not work, in terms that do not depend on the dialect.

    `message`, `type`, `code`, `param` are in the OpenAI manner and safe to show to a caller:
    no key, host name or server banner in them.
    """

    kind: FailureKind
    message: str
    status: int = 502
    type: str = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None  # s, as the server asked; not yet clamped

    @property
    def retryable(self) -> bool:
        """Whether another endpoint might do better."""
        return self.kind is not FailureKind.CLIENT


@dataclass(slots=True)
class Usage:
    """Tokens as the engine reports them. None: it did not say."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None


@dataclass(slots=True)
class EngineTimes:
    """What the engine says of this request (vLLM --enable-per-request-metrics), seconds."""

    queue: float | None = None  # until the scheduler took it up
    prefill: float | None = None  # from there to its first token
    mean_itl: float | None = None

    @property
    def ttft(self) -> float | None:
        """From the engine's queue to its first token."""
        return None if self.prefill is None else self.prefill + (self.queue or 0.0)


class Tap(Protocol):
    """Reads one response body as it passes; never changes or delays a byte of it."""

    tokens: int  # visible output events so far: the token count until usage says better
    usage: Usage
    times: EngineTimes
    ended: bool  # finish_reason or [DONE] was seen (streams); the whole body parsed (not streamed)
    failure: Failure | None  # an error event

    def feed(self, data: bytes) -> bool:
        """Read bytes of the body. True: visible output is among them (content, reasoning or a tool call)."""
        ...

    def close(self) -> None:
        """The body is complete."""
        ...


class Backend(Protocol):
    """One dialect, configured for one pool."""

    kind: str
    local: bool  # an engine whose queue and cache can be modelled, as opposed to an API
    secret: bytes  # our key: not to be passed on to callers; empty: there is none
    salted: bool  # keeps the caches of different `cache_salt`s apart

    def call(self, forward: BackendRequest) -> HttpCall: ...

    def tap(self, forward: BackendRequest) -> Tap: ...

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> Failure:
        """The meaning of a non-2xx reply. Header names are lower case."""
        ...

    def probe(self) -> HttpCall | None:
        """A cheap request that says whether the server lives; None: only real traffic tells."""
        ...

    def load(self) -> HttpCall | None:
        """A request whose answer `read_load` understands."""
        ...

    def read_load(self, body: bytes) -> Mapping[str, float | None]:
        """Fields of policies.types.EngineLoad by name (the packages do not know each other)."""
        ...


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """What the catalog needs to build a backend."""

    kind: str
    model: str
    api_key: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)  # extra, from config
