"""The APIs of the field behind one socket: an HTTP proxy whose tunnels end in the fakes.

A pool reaches its API by the API's own host, through `proxy:`, so a gateway knows it as it knows the real one. In the
tunnel is plain HTTP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tests.programs.field.answers import Turn
from tests.programs.field.dice import Dice
from tests.programs.field.fakes import Fake
from tests.programs.field.refusals import refusal
from tests.programs.field.rules import Target, Violation, targets
from tests.programs.field.state import Ledger

_PATHS = {"/chat/completions": "chat", "/messages": "messages", "/responses": "responses"}
SPARE = "http://spare.field.test/v1"  # of an API that is always overloaded
FURTHER = (
    "http://further.field.test/v1"  # of one that speaks chat completions and Responses, and answers whatever it gets
)
_JSON, _EVENTS = b"application/json", b"text/event-stream"


@dataclass(frozen=True)
class Exchange:
    """A request as a server got it. `turn`: absent where it was refused; `lost`: turns of its own maker that came back
    without their state."""

    target: Target
    dialect: str
    body: dict[str, Any]
    violations: list[Violation]
    lost: list[str]
    turn: Turn | None


@dataclass
class Accounts:
    """Accounts of one conversation, one at each API. `lenient`: what breaks a rule is answered all the same, so that
    the conversation goes on and later rules are seen."""

    random: Dice
    lenient: bool = False
    exchanges: list[Exchange] = field(default_factory=list)
    fakes: dict[str, Fake] = field(default_factory=dict)

    def answer(
        self, target: Target, dialect: str, body: dict[str, Any], *, lenient: bool = False
    ) -> tuple[int, bytes, bytes]:
        """Status, media type and body."""
        fake = self.fakes.setdefault(target.name, Fake(target, self.random, Ledger()))
        found = fake.verify(dialect, body)
        lost = [] if found and found[0].kind.startswith(("path", "shape")) else fake.ledger.lost(dialect, body)
        if found and not (lenient or self.lenient):
            self.exchanges.append(Exchange(target, dialect, body, found, lost, None))
            status, words = refusal(target, found[0])
            return status, _JSON, words
        stream = body.get("stream") is True
        turn = fake.turn(dialect, body)
        raw = fake.write(dialect, body, turn, stream=stream)
        self.exchanges.append(Exchange(target, dialect, body, found, lost, turn))
        return 200, _EVENTS if stream else _JSON, raw


class Providers:
    """An async context manager. `accounts`: of the conversation that is under way."""

    def __init__(self) -> None:
        self.accounts = Accounts(Dice(0))
        self._hosts: dict[str, list[Target]] = {}
        for target in targets():
            self._hosts.setdefault(authority(target), []).append(target)

    async def __aenter__(self) -> Providers:
        loop = asyncio.get_running_loop()
        self._open: set[asyncio.BaseTransport] = set()
        self._server = await loop.create_server(lambda: _Tunnel(self.serve, self._open), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for transport in list(self._open):
            transport.close()

    def serve(self, host: str, method: str, path: str, body: bytes) -> tuple[int, bytes, bytes]:
        """Answer as the API of the host does. Names of models are read from the body, else from the path."""
        if host == urlsplit(FURTHER).netloc + ":80":
            return self._further_page(method, path, body)
        if host not in self._hosts:
            return 503, _JSON, b'{"error": {"message": "Overloaded", "type": "server_error", "code": null}}'
        known = self._hosts[host]
        if method != "POST":
            return self._side_page(known, path)
        asked = json.loads(body)
        found = [each for each in known if each.model == asked.get("model") or f"/{each.model}/" in path]
        dialect = next((name for end, name in _PATHS.items() if path.partition("?")[0].endswith(end)), None)
        if not found or dialect is None:
            return 404, _JSON, b'{"error": {"message": "Not Found", "type": "invalid_request_error", "code": null}}'
        return self.accounts.answer(found[0], dialect, asked)

    def _further_page(self, method: str, path: str, body: bytes) -> tuple[int, bytes, bytes]:
        dialect = next((name for end, name in _PATHS.items() if path.endswith(end) and name != "messages"), None)
        if method != "POST" or dialect is None:
            return 404, _JSON, b"{}"
        return self.accounts.answer(_further_target(), dialect, json.loads(body), lenient=True)

    def _side_page(self, known: list[Target], path: str) -> tuple[int, bytes, bytes]:
        if path.endswith("/models"):
            return 200, _JSON, json.dumps({"object": "list", "data": [{"id": each.model} for each in known]}).encode()
        return 404, _JSON, b"{}"


@cache
def _further_target() -> Target:
    """A model that shows no reasoning and knows all roles."""
    plain = next(target for target in targets() if target.name == "openai:gpt-4.1")
    return replace(plain, api="further")


def authority(target: Target) -> str:
    """Host and port of a target's API, as a proxy is asked for them."""
    url = urlsplit(plain_url(target))
    return f"{url.hostname}:{url.port or 80}"


def plain_url(target: Target) -> str:
    return str(target.rules["url"]).replace("https://", "http://")


class _Tunnel(asyncio.Protocol):
    """One connection: CONNECT, then requests one after another."""

    def __init__(
        self, serve: Callable[[str, str, str, bytes], tuple[int, bytes, bytes]], connections: set[asyncio.BaseTransport]
    ) -> None:
        self._serve, self._connections = serve, connections
        self._data, self._host = b"", ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            lines = self._data[:end].decode("latin-1").split("\r\n")
            method, path, _ = lines[0].split(" ")
            size = sum(int(line[15:]) for line in lines if line.lower().startswith("content-length:"))
            if len(self._data) < end + 4 + size:
                return
            body, self._data = self._data[end + 4 : end + 4 + size], self._data[end + 4 + size :]
            self._request(method, path, body)

    def _request(self, method: str, path: str, body: bytes) -> None:
        if method == "CONNECT":
            self._host = path
            self._transport.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            return
        status, media, answer = self._serve(self._host, method, path, body)
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(answer)}\r\ncontent-type: ".encode()
        later = b"\r\nretry-after: 60" if status == 503 else b""  # none waits for it within a budget of a second
        self._transport.write(head + media + later + b"\r\n\r\n" + answer)
