"""A minimal-cost server which looks like vLLM: `engine.py PORT...`.

The end of the prompt selects the answer: `[stream-N-MS]` is a stream of N tokens, MS milliseconds apart, the first
with the head; `[stream-N-MS-WAIT]` begins after WAIT milliseconds, as behind a prefill; `[hose]` is a stream as fast as
the reader, for OFFERED bytes, without an end; any other prompt is answered at once and whole. (Some routers drop
unknown models and fields.) `GET /taken` reports the bytes written to hoses, of which up to SEND_BUFFER each are still
in the send buffer.
"""

from __future__ import annotations

import asyncio
import re
import sys
from socket import SO_SNDBUF, SOL_SOCKET

import uvloop
from httptools import HttpParserError, HttpRequestParser

JSON, TEXT = b"application/json", b"text/plain; version=0.0.4"


def whole(body: bytes, kind: bytes = JSON) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(delta: bytes, finish: bytes = b"null") -> bytes:
    return framed(
        b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1760000000,"model":"m",'
        b'"choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (delta, finish)
    )


ANSWER = whole(
    b'{"id":"x","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"Hello there"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":50,"total_tokens":60,"completion_tokens":10}}'
)
MISSING = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ROLE = event(b'{"role":"assistant","content":""}')
TOKEN = event(b'{"content":" token"}')
END = event(b"{}", b'"stop"') + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
HOSE = event(b'{"content":"%b"}' % (b"x" * 400)) * 20
OFFERED = 400 * 1024  # by a hose: with thousands of hoses, the most a kernel can buffer
SHAPE = re.compile(rb"\[(?:hose|stream-(\d+)-(\d+)(?:-(\d+))?)\]")
SEND_BUFFER = 16 * 1024  # bytes, of a hose: not yet taken
TAIL = 4096  # bytes at the end of a body that are searched
MODEL = b"bench"  # as configured in `benchmarks.serve`: the gateway asks
INFO = whole(
    b'{"model_path":"%b","tokenizer_path":"%b","is_generation":true,"served_model_name":"%b"}' % ((MODEL,) * 3)
)
SERVER = whole(
    b'{"model_path":"%b","served_model_name":"%b","tp_size":1,"dp_size":1,"version":"0.5.0"}' % ((MODEL,) * 2)
)
SMALL = {  # probes which routers send first
    b"/health": whole(b"{}"),
    b"/health_generate": whole(b"{}"),
    b"/v1/models": whole(
        b'{"object":"list","data":[{"id":"%b","object":"model","owned_by":"vllm","root":"%b"}]}' % (MODEL, MODEL)
    ),
    b"/get_model_info": INFO,
    b"/model_info": INFO,
    b"/get_server_info": SERVER,
    b"/server_info": SERVER,
    b"/version": whole(b'{"version":"0.11.0"}'),
    b"/metrics": whole(b'vllm:num_requests_running{model_name="%b"} 0.0\n' % MODEL, TEXT),
}


class Connection(asyncio.Protocol):
    """One request at a time."""

    taken = 0  # bytes, of all hoses

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.parser: HttpRequestParser | None = HttpRequestParser(self)
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None
        self.turn: asyncio.Handle | None = None
        self.hosing, self.offered = False, 0

    def connection_lost(self, exc: Exception | None) -> None:
        self.hosing, self.parser = False, None
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            if self.parser is not None:
                self.parser.feed_data(data)
        except HttpParserError:  # a router probing for HTTP/2
            self.transport.close()

    def on_message_begin(self) -> None:
        self.path, self.parts = b"", list[bytes]()

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def on_message_complete(self) -> None:
        if self.path == b"/taken":
            self.transport.write(whole(b"%d" % Connection.taken))
        elif self.path != b"/v1/chat/completions":
            self.transport.write(SMALL.get(self.path, MISSING))
        else:
            body = b"".join(self.parts)
            self.answer(SHAPE.search(body, max(len(body) - TAIL, 0)))

    def answer(self, shape: re.Match[bytes] | None) -> None:
        if shape is None:
            self.transport.write(ANSWER)
        elif shape[1] is None:
            self.transport.write(HEAD + ROLE)
            self.hosing, self.offered = True, 0
            self.transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, SEND_BUFFER)
            self.hose()
        else:
            tokens, gap, wait = (int(each or 0) for each in shape.groups())
            begins = self.loop.time() + wait / 1e3
            if wait:
                self.timer = self.loop.call_at(begins, self.begin, tokens, gap / 1e3, begins)
            else:
                self.begin(tokens, gap / 1e3, begins)

    def begin(self, tokens: int, gap: float, now: float) -> None:
        self.transport.write(HEAD + ROLE + TOKEN)
        self.timer = self.loop.call_at(now + gap, self.stream, tokens - 1, gap, now + gap)

    def stream(self, left: int, gap: float, due: float) -> None:
        self.transport.write(TOKEN if left else END)
        due += gap
        self.timer = self.loop.call_at(due, self.stream, left - 1, gap, due) if left else None

    def hose(self) -> None:
        """One write per loop iteration: a fast reader must not starve other connections."""
        self.turn = None
        if self.hosing and self.offered < OFFERED and not self.transport.is_closing():
            self.transport.write(HOSE)
            self.offered += len(HOSE)
            Connection.taken += len(HOSE)
            self.turn = self.loop.call_soon(self.hose)

    def pause_writing(self) -> None:
        self.hosing = False

    def resume_writing(self) -> None:
        self.hosing = True
        if self.turn is None:
            self.hose()


async def main(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Connection, "127.0.0.1", port, backlog=4096) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(main([int(port) for port in sys.argv[1:]]))
