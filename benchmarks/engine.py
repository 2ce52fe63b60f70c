"""A server that looks like vLLM and costs next to nothing: `engine.py PORT`.

A request's `model` says what it gets: `stream-N-MS` is a stream of N tokens, MS milliseconds apart;
anything else a whole answer.
"""

from __future__ import annotations

import asyncio
import re
import sys

import uvloop

BODY = b'{"id":"x","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Hello there"},"finish_reason":"stop"}],"usage":{"prompt_tokens":50,"total_tokens":60,"completion_tokens":10}}'  # noqa: E501
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
MISSING = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SHAPE = re.compile(rb'"model":\s*"stream-(\d+)-(\d+)"')
LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)


CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1760000000,"model":"m",'
    b'"choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}]}\n\n'
)


def event(delta: bytes, finish: bytes = b"null") -> bytes:
    data = CHUNK % (delta, finish)
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = event(b'{"content":" token"}')
DONE = b"data: [DONE]\n\n"
END = event(b"{}", b'"stop"') + b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE)


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if found and len(body) >= (int(length[1]) if length else 0):
            self.buffer = b""
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        shape = SHAPE.search(body[:200]) or SHAPE.search(body[-200:])
        if not head.startswith(b"POST /v1/chat/completions"):
            self.transport.write(MISSING)
        elif shape is None:
            self.transport.write(WHOLE)
        else:
            self.transport.write(HEAD + event(b'{"role":"assistant","content":""}'))
            self.stream(int(shape[1]), int(shape[2]) / 1e3, asyncio.get_running_loop().time())

    def stream(self, left: int, gap: float, due: float) -> None:
        self.transport.write(TOKEN if left else END)
        if left:
            due += gap
            asyncio.get_running_loop().call_at(due, self.stream, left - 1, gap, due)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
