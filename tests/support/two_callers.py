"""A server that answers one caller well and another with a reply under test, and the replies to try.

A request tells its caller by a mark in its content. Whatever has no mark of key a is answered well: requests of key b,
probes, and the gateway's own requests.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from typing import Any

from backends.interface import FailureKind, Operation
from tests.backends.replies.reply import MODEL, SECRET, Reply, openai_error, replies
from tests.backends.replies.reply import event as sse
from tests.support.builders import DONE, ERROR, Caller, calling, post
from tests.support.dialect_strategies import message_events, named_sse
from tests.support.upstream import (
    CLOSE,
    HANG,
    LAST_CHUNK,
    RESET,
    STREAM_HEAD,
    Received,
    Script,
    Upstream,
    chunk,
    chunked,
    reply,
)

A, B = "sk-a-0123456789abcdef", "sk-b-0123456789abcdef"
GATEWAY = ""  # caller of the gateway's own requests
KEYS = [{"name": name, "sha256": sha256(key.encode()).hexdigest()} for name, key in (("a", A), ("b", B))]
MARKS = {A: "asked by a", B: "asked by b"}
JSON, EVENTS, PAGE = "content-type: application/json", "content-type: text/event-stream", "content-type: text/html"
PATIENCE = 0.3  # s until key a hangs up

MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": MODEL,
    "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 7, "output_tokens": 2},
}
CHAT = {"id": "c1", "object": "chat.completion", "created": 1, "model": MODEL}
USAGE = {"usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}}
SAID = {"role": "assistant", "content": "hi"}


def part(*choices: Mapping[str, Any], **more: Any) -> bytes:
    """An event of a chat."""
    return sse({**CHAT, "object": "chat.completion.chunk", "choices": choices, **more})


WHOLE = json.dumps({**CHAT, "choices": [{"index": 0, "message": SAID, "finish_reason": "stop"}], **USAGE}).encode()
TOKEN = part({"index": 0, "delta": SAID, "finish_reason": None})
FINISH = part({"index": 0, "delta": {}, "finish_reason": "stop"})
GOOD: Mapping[tuple[bool, bool], bytes] = {  # by (Messages, streamed)
    (False, True): chunked(TOKEN, FINISH, part(**USAGE), DONE),
    (False, False): reply(WHOLE, "200 OK", JSON),
    (True, True): chunked(*named_sse(message_events(MESSAGE))),
    (True, False): reply(json.dumps(MESSAGE).encode(), "200 OK", JSON),
}


# --------------------------------------------------------------------------- the server


class UpstreamByCaller(Upstream):
    """Plays a script to each caller of `by_caller`, and answers all others well. `asked`: requests by caller."""

    def __init__(self, by_caller: Mapping[str, Script], host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(host=host, port=port)
        self.by_caller = by_caller
        self.asked: Counter[str] = Counter()

    def script(self, received: Received) -> Script:
        if received.method == "GET":
            return [reply()]
        if received.target == "/tokenize":
            return [reply(b'{"count": 9}')]
        caller = next((key for key, mark in MARKS.items() if mark.encode() in received.body), GATEWAY)
        self.asked[caller] += 1
        is_messages, stream = received.target.endswith("/messages"), json.loads(received.body).get("stream")
        return self.by_caller.get(caller, [GOOD[is_messages, bool(stream)]])


# --------------------------------------------------------------------------- the callers


def request(
    key: str, number: int, operation: Operation = Operation.CHAT, stream: bool | None = None, model: str = "chat"
) -> bytes:
    """A small request; every other one is streamed, if `stream` does not say."""
    said = f"{MARKS[key]}: {number}"
    content = {"input": said} if operation is Operation.RESPONSES else {"messages": [{"role": "user", "content": said}]}
    body = {"model": model, "stream": number % 2 == 0 if stream is None else stream, **content}
    limit = "max_output_tokens" if operation is Operation.RESPONSES else "max_tokens"
    return post({**body, limit: 9}, f"authorization: Bearer {key}", path=operation.value)


async def provoke(
    url: str, kind: Provocation, number: int, key: str = A, *, model: str = "chat", patience: float = PATIENCE
) -> None:
    """Send one request, read the reply for `patience` seconds, and hang up."""
    asked = request(key, number, kind.operation, kind.stream, model)
    async with calling(url) as caller:
        caller.writer.write(asked.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(patience):
                await caller.reader.read()


async def complaint(caller: Caller, number: int) -> str:
    """Send one request of key b. Returns the fault of the answer; empty: a complete answer of the first attempt."""
    try:
        status, headers = await caller.ask(request(B, number))
        streamed = "transfer-encoding" in headers
        body = b"".join(await caller.chunks()) if streamed else await caller.body(headers)
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
        return f"no answer: {error!r}"
    if status != HTTPStatus.OK:
        return f"{status} {body.decode()}"
    if headers["x-firsttoken-attempts"] != "1":
        return f"{headers['x-firsttoken-attempts']} attempts"
    ended = DONE.strip() if streamed else b"}"
    return "" if b'"hi"' in body and body.strip().endswith(ended) else f"not the answer: {body.decode()}"


# --------------------------------------------------------------------------- the replies


@dataclass(frozen=True)
class Provocation:
    """Reply to the requests of key a. `backend`: kind of server that replies so."""

    name: str
    script: Script
    backend: str = "compatible"
    operation: Operation = Operation.CHAT
    stream: bool | None = None  # None: both
    defaults: Mapping[str, str] = field(default_factory=dict)  # of the gateway

    @property
    def pool(self) -> dict[str, Any]:
        return {"backend": self.backend, "model": MODEL, "api_key": SECRET}


def documented(said: Reply) -> Provocation:
    """A reply of the table, on the wire."""
    phrase = {status.value: status.phrase for status in HTTPStatus}.get(said.status, "Unknown")
    is_stream = said.status == HTTPStatus.OK and isinstance(said.body, bytes)
    kind = EVENTS if is_stream else PAGE if isinstance(said.body, str) else JSON
    headers = [kind, *(f"{name}: {value}" for name, value in said.headers.items())]
    script = [reply(said.content, f"{said.status} {phrase}", *headers)]
    stream = None if said.status != HTTPStatus.OK else is_stream
    return Provocation(f"{said.provider}: {said.name}", script, said.backend, said.operation, stream)


PROVEN = {  # one of each took a pool away from all callers
    "openai: request too large",
    "openai: requests",
    "openai: vector store",
    "openai: container",
    "anthropic: file",
    "vllm: response, older",
    "xai: unsafe content",
}
PER_KIND = 4  # of each kind of failure, as far as the table has them


def is_of_the_account(said: Reply) -> bool:
    """True where the provider's own figures say that nothing remains of a limit: they are about the account."""
    return any("remaining" in name and value == "0" for name, value in said.headers.items())


def chosen() -> list[Reply]:
    """The proven cases, and of each kind of failure the replies of the providers that have been chosen least."""
    table = [said for said in replies() if not is_of_the_account(said)]
    found = [said for said in table if f"{said.provider}: {said.name}" in PROVEN]
    for kind in FailureKind:
        have = sum(said.kind is kind for said in found)
        for _ in range(PER_KIND - have):
            taken = Counter(said.provider for said in found)
            left = [said for said in table if said.kind is kind and said not in found]
            found += sorted(left, key=lambda said: taken[said.provider])[:1]
    return found


CUT = reply(b"x" * 1000, "200 OK", JSON)[:-900]
FOREVER = "retry-after: 86400"
BEGUN = STREAM_HEAD + chunk(TOKEN)

RAW = [
    Provocation("a reset before a byte", [RESET]),
    Provocation("a close before a byte", [CLOSE]),
    Provocation("a reset after the head", [STREAM_HEAD, RESET]),
    Provocation("a close after the head", [STREAM_HEAD, CLOSE]),
    Provocation("a reset in mid-answer", [BEGUN, RESET], stream=True),
    Provocation("a close in mid-answer", [BEGUN, CLOSE], stream=True),
    Provocation("half a head", [b"HTTP/1.1 200 OK\r\ncontent-", CLOSE]),
    Provocation("half a body", [CUT, CLOSE]),
    Provocation("half a JSON", [reply(WHOLE[:30], "200 OK", JSON)], stream=False),
    Provocation("no HTTP", [b"\x15\x03\x01\x00\x02\x02\x50", CLOSE]),
    Provocation("two lengths", [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}", CLOSE]),
    Provocation("a head of 1 MB", [reply(b"{}", "200 OK", JSON, "x-long: " + "x" * 1_000_000), CLOSE]),
    Provocation("two replies to one request", [reply(b"{}", "500 Internal Server Error", JSON) * 2]),
    Provocation("a page", [reply(b"<html>please log in</html>", "200 OK", PAGE)]),
    Provocation("a compressed answer", [reply(gzip.compress(WHOLE), "200 OK", JSON, "content-encoding: gzip")]),
    Provocation("an empty 200", [reply(b"", "200 OK", JSON)]),
    Provocation("an empty stream", [STREAM_HEAD + LAST_CHUNK]),
    Provocation("a stream of junk", [chunked(b"data: {not json\n\n" * 9)]),
    Provocation("an error event at first", [chunked(ERROR)]),
    Provocation("an error event in mid-answer", [chunked(TOKEN, ERROR)], stream=True),
    Provocation("a denial in mid-answer", [chunked(TOKEN, sse(openai_error("No.", "authentication_error")))]),
    Provocation("no end of the stream", [chunked(TOKEN + FINISH[:20])]),
    Provocation("a redirect", [reply(b"", "302 Found", "location: http://127.0.0.1:9/login")]),
    Provocation("a 204", [b"HTTP/1.1 204 No Content\r\n\r\n"]),
    Provocation("an early hint and a close", [b"HTTP/1.1 103 Early Hints\r\n\r\n", CLOSE]),
    Provocation("429 for a day", [reply(b"{}", "429 Too Many Requests", JSON, FOREVER)]),
    Provocation("503 for a day", [reply(b"{}", "503 Service Unavailable", JSON, FOREVER)]),
    Provocation("500 for a day", [reply(b"{}", "500 Internal Server Error", JSON, FOREVER)]),
    Provocation("silence, until the caller hangs up", [HANG]),
    Provocation("silence", [HANG], defaults={"first_token": "200ms"}),
    Provocation("silence after the head", [STREAM_HEAD, HANG], defaults={"first_token": "200ms"}),
    Provocation("silence in mid-answer", [BEGUN, HANG], stream=True, defaults={"stream_idle": "100ms"}),
]
PROVOCATIONS = [*map(documented, chosen()), *RAW]
