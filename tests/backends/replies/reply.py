"""Replies of servers that are no answers, in the servers' own words, and what each of them shows.

A module of this folder with REPLIES is one provider or engine; `test_replies` reads them all. The model that the
gateway asks for is MODEL, its key SECRET. Where a server quotes the request, the quoted text is PROMPT.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from backends import catalog, failures
from backends.interface import BackendConfig, BackendRequest, Failure, FailureKind, Operation

MODEL, SECRET, PROMPT = "m-1", "sk-own-0123456789abcdef", "my secret diary"
HTML = "<html>\r\n<head><title>{0}</title></head>\r\n<body>\r\n<center><h1>{0}</h1></center>\r\n{1}</body>\r\n</html>"

_LIMITED, _USED_UP = (429, "rate_limit_exceeded"), (429, "insufficient_quota")
_TOLD = {  # status and code for the caller; a status of 0 is the server's
    FailureKind.PROTOCOL: (502, None),
    FailureKind.SERVER: (502, None),
    FailureKind.PROVIDER: (502, None),
    FailureKind.TIMEOUT: (504, None),
    FailureKind.OVERLOADED: (503, None),
    FailureKind.RATE_LIMITED: _LIMITED,
    FailureKind.REQUEST_RATE: _LIMITED,
    FailureKind.TOKEN_RATE: _LIMITED,
    FailureKind.REQUEST_SIZE: (413, "request_too_large"),
    FailureKind.AUTH: (502, None),
    FailureKind.MISCONFIGURED: (0, "model_not_found"),
    FailureKind.QUOTA: _USED_UP,
    FailureKind.CLIENT: (0, None),
    FailureKind.CONTEXT: (0, "context_length_exceeded"),
    FailureKind.CONTENT_FILTER: (0, "content_filter"),
    FailureKind.CONTENT: (0, None),
}
NOT_SERVED = (502, None)  # a wrong path


@dataclass(frozen=True)
class Reply:
    """`backend`: the kind by which the gateway speaks to the server. `status` 200: an error inside, as events (bytes)
    or as a whole body."""

    provider: str
    backend: str
    name: str
    status: int
    body: Any
    kind: FailureKind
    caller: tuple[int, str | None] | None = None  # status and code; None: as usual for the kind
    headers: Mapping[str, str] = field(default_factory=dict)
    learned: float | None = None  # s until the server wants to be asked again
    operation: Operation = Operation.CHAT

    @property
    def told(self) -> tuple[int, str | None]:
        status, code = self.caller or _TOLD[self.kind]
        return status or self.status, code

    @property
    def content(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return self.body.encode() if isinstance(self.body, str) else json.dumps(self.body).encode()

    def read(self) -> Failure:
        """Read the reply as the gateway does."""
        backend = catalog.build(BackendConfig(self.backend, MODEL, api_key=SECRET))
        if self.status != 200:
            return backend.failure(self.status, self.headers, self.content)
        streamed = isinstance(self.body, bytes)
        tap = backend.tap(BackendRequest(self.operation, {}, MODEL, stream=streamed))
        tap.feed(self.content)
        tap.close()
        whole = None if streamed else failures.of_body(self.content, SECRET)
        assert tap.failure is not None
        assert whole in (None, tap.failure)
        return tap.failure


def of(provider: str, backend: str = "compatible") -> partial[Reply]:
    return partial(Reply, provider, backend)


def openai_error(message: str, type: str | None = None, code: object = None, param: str | None = None) -> Any:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def event(value: Any, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def replies() -> Sequence[Reply]:
    modules = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    found = [
        getattr(import_module(f"{__package__}.{name}"), "REPLIES", ())
        for name in modules
        if not name.startswith(("_", "test_"))
    ]
    return [reply for some in found for reply in some]
