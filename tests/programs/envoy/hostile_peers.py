"""Bytes that no data plane should send to the endpoint picker, by family: `FAMILIES`.

A case is made from a generator of random numbers alone: its seed repeats it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from backends.ext_proc.messages import BodyMode
from gateway.parts.picker.picker import DESTINATION
from gateway.parts.picker.picker_service import HEALTH, PROCESS
from tests.support.ext_proc import (
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProtocolConfiguration,
)
from tests.support.grpc_client import framed

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4
CHAT = {"model": "served", "stream": True, "messages": [{"role": "user", "content": "hello " * 40}]}


@dataclass(frozen=True, slots=True)
class Case:
    """`data`: all bytes of the peer. `reads`: it reads the answers."""

    family: str
    data: bytes
    reads: bool = True


# -- frames -------------------------------------------------------------------------------------


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return size.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def literal(name: str, value: str) -> bytes:
    """A header of HPACK, without index and Huffman code: blocks do not depend on each other."""
    return b"\x00" + _hpack_text(name) + _hpack_text(value)


def _hpack_text(text: str) -> bytes:
    raw = text.encode("latin-1")
    return integer(len(raw), 7) + raw


def integer(value: int, bits: int, first: int = 0) -> bytes:
    """An integer of HPACK, with a prefix of `bits` in a byte whose other bits are those of `first`."""
    limit = (1 << bits) - 1
    if value < limit:
        return bytes((first | value,))
    found, value = bytearray((first | limit,)), value - limit
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def block(path: str = PROCESS, **more: str) -> bytes:
    found = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "picker", "te": "trailers"}
    return b"".join(
        literal(name, value) for name, value in {**found, "content-type": "application/grpc", **more}.items()
    )


CALL, CHECK_HEALTH = block(), block(HEALTH)
START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)


def begin(stream: int, headers: bytes = CALL, flags: int = 0) -> bytes:
    return frame(HEADERS, END_HEADERS | flags, stream, headers)


def data(stream: int, raw: bytes, end: bool = False) -> bytes:
    """DATA frames of up to 16 KB."""
    pieces = [raw[at : at + 16_384] for at in range(0, len(raw), 16_384)] or [b""]
    return b"".join(frame(DATA, int(end and piece is pieces[-1]), stream, piece) for piece in pieces)


def setting(key: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, key.to_bytes(2, "big") + (value & 0xFFFFFFFF).to_bytes(4, "big"))


# -- messages -----------------------------------------------------------------------------------


def headers_of(values: Mapping[str, str], end: bool = False) -> HttpHeaders:
    pairs = [HeaderValue(key=name, raw_value=value.encode("utf-8", "replace")) for name, value in values.items()]
    return HttpHeaders(headers=HeaderMap(headers=pairs), end_of_stream=end)


def _requests() -> list[dict[str, Any]]:
    post = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
    odd = {
        ":path": "",
        DESTINATION: "1.2.3.4:5",
        "x-slo-ttft-ms": "nan",
        "x-request-id": "\n" * 400,
        "x-priority": "9" * 99,
    }
    return [
        {"request_headers": headers_of(post)},
        {"request_headers": headers_of({**post, "x-llm-d-slo-ttft-ms": "800"})},
        {"request_headers": headers_of({":method": "GET", ":path": "/v1/models"}, True)},
        {"request_headers": headers_of(odd)},
        {"request_headers": headers_of({"x" * each: "y" * 50 for each in range(1, 60)})},
        *({"request_body": HttpBody(body=raw, end_of_stream=end)} for raw in _bodies() for end in (True, False)),
        {"request_trailers": HttpTrailers()},
    ]


def _bodies() -> list[bytes]:
    return [json.dumps(CHAT).encode(), b"{" * 3000, b"\xff" * 60, b"", b"[]", json.dumps({**CHAT, "model": 7}).encode()]


def _responses() -> list[dict[str, Any]]:
    statuses = ("200", "500", "429", "", "abc", "9" * 50, "-1", "\u0663")
    first = b'data: {"choices": [{"index": 0, "delta": {"content": "Hello"}}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": 1e400}}\n\ndata: [DONE]\n\n'
    return [
        *({"response_headers": headers_of({":status": status})} for status in statuses),
        {"response_headers": headers_of({":status": "200", "content-encoding": "gzip"})},
        *(
            {"response_body": HttpBody(body=raw, end_of_stream=end)}
            for raw in (first, usage, b"\x00")
            for end in (True, False)
        ),
        {"response_trailers": HttpTrailers()},
    ]


def _messages() -> list[list[bytes]]:
    """By part of the exchange, in order: valid messages in every body mode, some with metadata and attributes."""
    found: dict[str, list[bytes]] = {}
    for part in [*_requests(), *_responses(), {}]:
        of_kind = found.setdefault(next(iter(part), "none"), [])
        for mode in (BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED, BodyMode.FULL_DUPLEX):
            modes = ProtocolConfiguration(request_body_mode=int(mode), response_body_mode=int(mode))  # type: ignore[arg-type]
            sent = ProcessingRequest(**part, protocol_config=modes)
            sent.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": "127.0.0.1:1"})
            subset = {f"{DESTINATION}-subset": ["127.0.0.1"]}
            sent.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(subset)
            of_kind += [sent.SerializeToString(), ProcessingRequest(**part, protocol_config=modes).SerializeToString()]
    return [*found.values()]


BY_PART = _messages()
MESSAGES = [message for messages in BY_PART for message in messages]


def mutated(raw: bytes, random: Random) -> bytes:
    """Bytes replaced, inserted, removed or repeated."""
    found = bytearray(raw)
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(found))
        to = min(len(found), at + random.randint(0, 20))
        found[at:to] = random.choice(
            (random.randbytes(random.randint(0, 20)), bytes(found[at:to]) * 2, b"\xff" * 10, b"")
        )
    return bytes(found)


# -- families -----------------------------------------------------------------------------------


def exchange(random: Random) -> list[bytes]:
    """Messages of a call: in the order of an exchange, some left out or sent more than once; or in none."""
    if random.random() < 0.4:
        return [random.choice(MESSAGES) for _ in range(random.randint(0, 6))]
    return [random.choice(part) for part in BY_PART for _ in range(random.choice((0, 1, 1, 1, 3)))]


def orders(random: Random) -> Case:
    """Calls with messages in any order, some of them changed."""
    found = bytearray(START)
    for stream in range(1, 1 + 2 * random.randint(1, 3), 2):
        sent = exchange(random)
        raw = b"".join(framed(mutated(each, random) if random.random() < 0.3 else each) for each in sent)
        found += begin(stream, random.choice((CALL, CALL, CALL, CHECK_HEALTH, block("/a.B/C"))))
        found += data(
            stream, raw[: random.randint(0, len(raw))] if random.random() < 0.2 else raw, random.random() < 0.4
        )
        if random.random() < 0.2:
            found += frame(RESET, 0, stream, random.randbytes(4))
    return Case("orders", bytes(found), random.random() < 0.9)


def prefixes(random: Random) -> Case:
    """Lengths and flags of gRPC's own that are wrong."""
    raw = random.choice(
        (b"\x01", b"\x00\xff\xff\xff\xff", b"\x00\x01\x00\x00\x00", b"\x00\x00\x05\x00\x00", random.randbytes(5))
    )
    return Case(
        "prefixes", START + begin(1) + data(1, raw + random.randbytes(random.randint(0, 4_000)), random.random() < 0.5)
    )


def frames(random: Random) -> Case:
    """Frames of any type, flags, stream and length, between valid ones."""
    found = bytearray(START)
    for _ in range(random.randint(1, 8)):
        stream = random.choice((0, 1, 1, 2, 3, 5, 0x7FFFFFFF, 0xFFFFFFFF))
        payload = random.choice((b"", CALL, random.randbytes(random.randint(0, 60)), framed(MESSAGES[0])))
        length = None if random.random() < 0.9 else random.choice((0, 1, len(payload) + 3, 0x4000, 0x4001, 0xFFFFFF))
        found += frame(
            random.choice((*range(10), 10, 255)), random.choice((0, 1, 4, 5, 8, 0x2C, 255)), stream, payload, length
        )
        if random.random() < 0.3:
            found += begin(1)
    return Case("frames", bytes(found))


def bytes_changed(random: Random) -> Case:
    """A valid exchange with bytes changed, or its beginning only."""
    whole = START + begin(1) + data(1, framed(MESSAGES[0]) + framed(random.choice(MESSAGES)), True)
    if random.random() < 0.4:
        return Case("truncated", whole[: random.randint(0, len(whole))])
    return Case("bytes changed", mutated(whole, random))


def garbage(random: Random) -> Case:
    return Case("garbage", random.randbytes(random.randint(0, 300)))


def floods(random: Random) -> Case:
    """Hundreds of frames that cost a server more than their sender."""
    count, stream = random.choice((70, 150, 400)), random.choice((0, 1))
    name, one = random.choice(
        (
            ("CONTINUATION", frame(CONTINUATION, 0, 1, literal("a", "b"))),
            ("empty CONTINUATION", frame(CONTINUATION, 0, 1)),
            ("SETTINGS", setting(INITIAL_WINDOW_SIZE, random.randint(0, 1 << 20))),
            ("PING", frame(PING, 0, 0, b"12345678")),
            ("WINDOW_UPDATE", frame(WINDOW_UPDATE, 0, stream, b"\x00\x00\x00\x01")),
            ("empty DATA", frame(DATA, 0, 1)),
            ("padding", frame(DATA, 8, 1, b"\xff" + b"\x00" * 255)),
            ("PRIORITY", frame(PRIORITY, 0, 1, b"\x00\x00\x00\x03\x00")),
            ("empty messages", frame(DATA, 0, 1, framed(b"") * 30)),
        )
    )
    head = frame(HEADERS, 0, 1, CALL) if "CONTINUATION" in name else begin(1)
    return Case(f"flood of {name}", START + head + one * count, random.random() < 0.8)


def resets(random: Random) -> Case:
    """Rapid reset: calls begun and given up, by the peer or by errors that the server must answer."""
    error = random.choice(
        (
            lambda stream: frame(RESET, 0, stream, b"\x00\x00\x00\x08"),
            lambda stream: frame(WINDOW_UPDATE, 0, stream, b"\x7f\xff\xff\xff"),
            lambda stream: frame(DATA, END_STREAM, stream) + frame(DATA, 0, stream, b"x"),
            lambda stream: frame(HEADERS, END_HEADERS, stream, literal("late", "1")),
        )
    )
    streams = range(1, 2 * random.choice((20, 60, 150)), 2)
    return Case("resets", START + b"".join(begin(each) + error(each) for each in streams), random.random() < 0.8)


def compression(random: Random) -> Case:
    """Header blocks that expand, refer to nothing, or are longer than any header may be."""
    stored = b"\x40" + _hpack_text("x") + _hpack_text("y" * random.choice((10, 3_900)))
    name, found = random.choice(
        (
            ("bomb", CALL + stored + integer(62, 7, 0x80) * random.choice((200, 5_000))),
            ("index of nothing", CALL + integer(random.randint(62, 1 << 40), 7, 0x80)),
            ("endless integer", CALL + b"\xff" + b"\x80" * random.randint(1, 4_000)),
            ("table size", integer(random.choice((0, 4_096, 1 << 30)), 5, 0x20) * random.randint(1, 300) + CALL),
            (
                "oversized header",
                CALL + literal("x" * random.choice((10, 9_000)), "y" * random.choice((7_000, 70_000))),
            ),
            ("many headers", CALL + literal("a", "") * random.choice((500, 2_100))),
            ("broken Huffman code", CALL + b"\x00\x81" + random.randbytes(1) + b"\x90" + random.randbytes(16)),
            ("no path", literal(":method", "POST")),
            ("twice", CALL + CALL),
            ("odd path", block(random.choice(("", "\x00", "/" * 5_000, PROCESS + "?x", "\xff")))),
        )
    )
    pieces = [found[at : at + 16_384] for at in range(0, len(found), 16_384)]
    sent = b"".join(frame(CONTINUATION, END_HEADERS * (each is pieces[-1]), 1, each) for each in pieces[1:])
    return Case(
        f"headers: {name}", START + frame(HEADERS, END_HEADERS * (len(pieces) == 1), 1, pieces[0]) + sent + data(1, b"")
    )


def tables(random: Random) -> Case:
    """Calls whose headers are stored, named by index, and forgotten, in any order."""
    found = bytearray(START)
    head = b"\x83\x86"  # POST, http
    for stream in range(1, 1 + 2 * random.randint(2, 12), 2):
        path = random.choice(
            (
                b"\x44" + _hpack_text(random.choice((PROCESS, HEALTH, "/"))),
                b"\x04" + _hpack_text(PROCESS),
                integer(random.randint(62, 66), 7, 0x80),
            )
        )
        more = random.choice((b"", b"\x40" + _hpack_text("x") + _hpack_text("y" * random.choice((1, 4_000, 5_000)))))
        table = random.choice((b"", b"", integer(random.choice((0, 60, 4_096)), 5, 0x20)))
        found += begin(stream, table + head + path + more, random.choice((0, END_STREAM)))
    return Case("headers: tables", bytes(found))


def windows(random: Random) -> Case:
    """Windows of nothing, that shrink below nothing or overflow, while answers wait."""
    found = bytearray(START)
    for _ in range(random.randint(1, 5)):
        found += random.choice(
            (
                setting(INITIAL_WINDOW_SIZE, random.choice((0, 0, 1, 10, 65_535, (1 << 31) - 1, 1 << 31))),
                frame(WINDOW_UPDATE, 0, random.choice((0, 1)), random.choice((0, 1, 0x7FFFFFFF)).to_bytes(4, "big")),
                begin(random.choice((1, 3, 5))) + data(1, b"".join(map(framed, MESSAGES[:8]))),
                setting(5, random.choice((0, 16_384, (1 << 24) - 1, 1 << 24))),
                setting(random.randint(0, 9), random.getrandbits(32)),
            )
        )
    return Case("windows", bytes(found), random.random() < 0.8)


# Weight of each family; that of floods is small, since one case has hundreds of frames.
FAMILIES: Mapping[Callable[[Random], Case], int] = {
    orders: 30,
    prefixes: 6,
    frames: 25,
    bytes_changed: 18,
    garbage: 4,
    floods: 2,
    resets: 1,
    compression: 6,
    tables: 6,
    windows: 8,
}
