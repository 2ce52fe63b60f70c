"""Polls of one endpoint: its page of the load, and its health page where the first one fails.

Rules:
- Evidence has ranks: an answer to a caller outranks a health page, which outranks a page of the load. A page of the
  load that is late, an error, garbage or another product's says that the load is not known, and nothing more.
- Only a failed connection is a server that is gone. Where the first page fails in any other way, the health page is
  asked before anything is concluded.
- An engine that names another model than configured is asked for all its models: the configured name may be a second
  name, or an adapter. An engine that takes requests for any name (SGLang) is at fault only if it served the configured
  model before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from time import monotonic

from backends.failures import TransportError
from backends.http.connection_pool import BufferedReply, ConnectionPool
from backends.interface import Backend, Contact, Failure, FailureKind, HttpCall
from policies.fleet.engine_load import EngineLoad
from policies.types import NEVER

PROBE_TIMEOUT = 2.0  # s
LARGEST_PAGE = 2 << 20  # bytes: vLLM's are some 100 KB, and the text is searched in the event loop
NOT_IMPLEMENTED = 501  # llama.cpp, started without a page of the load
MODELS_INTERVAL = 10.0  # s between two lists of models of an engine that names another than configured
MOST_LINES, LINES_WITHIN = 6, 60.0  # s: of a page that changes with each poll
_LOAD_FIELDS = frozenset(f.name for f in fields(EngineLoad))
_COUNTS = frozenset({"running", "waiting", "block_size", "kv_blocks"})
_MOST = 1e9  # larger counts are ignored


class PollFinding(Enum):
    """Finding of a poll about the server."""

    ALIVE = "alive"
    UNWELL = "unwell"  # the health page fails, is silent or cut off
    GONE = "gone"  # no connection: refused or unroutable
    UNASKED = "unasked"  # the gateway itself could not ask


@dataclass(frozen=True, slots=True)
class PollTarget:
    """An endpoint of `pool` with a load or health page. `model`: as configured; empty: any."""

    connections: ConnectionPool
    backend: Backend
    pool: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class PollResult:
    """`at`: monotonic time, the same in all processes. `load`: None where it is not told."""

    at: float
    found: PollFinding = PollFinding.ALIVE
    load: EngineLoad | None = None
    model: str = ""  # by the engine's own word; empty: not named
    wrong_model: bool = False  # the configured model is unknown there
    fault: str = ""  # "its /metrics answers 500"; where the server is UNWELL or GONE, how that shows
    refused: bool = False  # GONE: by the server's machine, and not for want of a way there
    other_ranks: str = ""  # data-parallel ranks of the server, if the configured rank is not one of these


class EndpointPoll:
    """Polls of one endpoint, and the state for the choice of the next page."""

    def __init__(self, endpoint: str, target: PollTarget, interval: float) -> None:
        self.endpoint, self.interval = endpoint, interval
        self.target = target
        self.unparsable = False  # with a logged failure
        self.wrong_model = self.served_model = False  # now; the configured one, ever
        self.heard_at = monotonic()  # latest shared result
        self.logged_at = NEVER  # latest change of model
        self.fault = self.told_fault = ""  # of the page of the load: now, and as logged
        self.faults = 0  # in a row
        self.asleep = False  # as logged
        self._told_at: deque[float] = deque(maxlen=MOST_LINES)
        self._listed_at = NEVER
        self._listed_for: tuple[str, float | None] = "", None  # model and start of the engine, when it was asked
        self._lists_model = True

    def may_tell(self, now: float) -> bool:
        """Takes one of the log lines about its page. Where there is none left, the next poll asks again: the last state
        is told in the end."""
        if len(self._told_at) == MOST_LINES and now - self._told_at[0] < LINES_WITHIN:
            return False
        self._told_at.append(now)
        return True

    async def ask(self) -> PollResult:
        """Raises nothing but what a reader of a page raises."""
        backend = self.target.backend
        page = backend.load() or backend.probe()
        assert page is not None
        reply = await self._fetch(page)
        fault = page_fault(page, reply)
        if isinstance(reply, Failure) and reply.kind is FailureKind.GATEWAY:
            return PollResult(monotonic(), PollFinding.UNASKED, fault=fault)
        if isinstance(reply, Failure) or _is_error(reply):
            return await self._without_page(page, reply, fault)
        if backend.load() is None:
            return PollResult(monotonic())
        return PollResult(monotonic(), fault=fault) if fault else await self._read(page, reply.body)

    async def _read(self, page: HttpCall, body: bytes) -> PollResult:
        backend = self.target.backend
        at, load, model = monotonic(), engine_load(backend.read_load(body)), backend.read_model(body)
        variants, slots = backend.read_adapters(body)
        if variants or slots:
            load = replace(load, variants=variants, variant_slots=slots)
        ranks = backend.other_ranks(body)
        fault = "" if load.running is not None else f"its {page.path} has no series of {backend.kind}"
        if ranks:
            fault = f"this server has {ranks}, by its {page.path}"
        known = await self._knows_model(model, load.started_at)
        return PollResult(at, PollFinding.ALIVE, load, model, not known, fault, other_ranks=ranks)

    async def _without_page(self, page: HttpCall, reply: BufferedReply | Failure, fault: str) -> PollResult:
        """The page has failed: the health page tells whether anybody serves."""
        health = self.target.backend.probe()
        if health is None:
            return PollResult(monotonic(), fault=fault)
        if health.path != page.path and not (isinstance(reply, Failure) and reply.contact is not Contact.MADE):
            reply = await self._fetch(health)
        if not isinstance(reply, Failure) and not _is_error(reply):
            return PollResult(monotonic(), fault=fault)
        if not isinstance(reply, Failure):
            return PollResult(monotonic(), PollFinding.UNWELL, fault=page_fault(health, reply))
        if reply.contact is Contact.MADE:
            return PollResult(monotonic(), PollFinding.UNWELL, fault=page_fault(health, reply))
        refused = reply.contact is not Contact.UNTRIED
        return PollResult(monotonic(), PollFinding.GONE, fault=reply.said, refused=refused)

    async def _knows_model(self, named: str, started_at: float | None) -> bool:
        """True if the engine serves the configured model. `named`: the model in its page."""
        wanted = self.target.model
        if not named or wanted in ("", named):
            self._listed_at, self._lists_model = NEVER, True
            return True
        if (named, started_at) != self._listed_for or monotonic() - self._listed_at > MODELS_INTERVAL:
            if (models := await self._models()) is None:
                return self._lists_model
            refused = self.target.backend.refuses_models or self.served_model
            self._lists_model = not models or wanted in models or not refused
            self._listed_at, self._listed_for = monotonic(), (named, started_at)
        return self._lists_model

    async def _models(self) -> frozenset[str] | None:
        """Names of all models; empty: the engine has no list; None: no answer now."""
        backend = self.target.backend
        if (call := backend.models()) is None:
            return frozenset()
        reply = await self._fetch(call)
        if isinstance(reply, Failure) or reply.status >= 500:
            return None
        return backend.read_models(reply.body) if reply.status == 200 else frozenset()

    async def _fetch(self, call: HttpCall) -> BufferedReply | Failure:
        try:
            return await self.target.connections.fetch(call, PROBE_TIMEOUT, LARGEST_PAGE)
        except TransportError as error:
            return error.failure


def _is_error(reply: BufferedReply) -> bool:
    return reply.status >= 500 and reply.status != NOT_IMPLEMENTED


def page_fault(page: HttpCall, reply: BufferedReply | Failure) -> str:
    """Fault of a page, for the operator; empty: it can be read."""
    if isinstance(reply, Failure):
        return f"its {page.path} fails: {reply.said}"
    return "" if reply.status == 200 else f"its {page.path} answers {reply.status}"


def engine_load(reported: Mapping[str, float | None]) -> EngineLoad:
    """Build an EngineLoad from the known fields; counts are whole numbers, and impossible ones are dropped."""
    known = {name: value for name, value in reported.items() if name in _LOAD_FIELDS and value is not None}
    for name in _COUNTS & known.keys():
        if 0 <= known[name] <= _MOST:
            known[name] = int(known[name])
        else:
            del known[name]
    if not 0 <= known.get("kv_usage", 0.0) <= 1:  # a percentage is no share: the engine would seem full for ever
        del known["kv_usage"]
    if "asleep" in known:
        known["asleep"] = bool(known["asleep"])
    return EngineLoad(**known)  # type: ignore[arg-type]
