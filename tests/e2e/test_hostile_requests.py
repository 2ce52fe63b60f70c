"""Hostile requests: each is refused with a 4xx in the OpenAI envelope, at once, and none reaches a backend."""

from __future__ import annotations

import asyncio
import json
from time import monotonic

import pytest

from gateway.app import Gateway
from tests.e2e.test_bad_input import BODIES, FRAMING, PATHS, POST, CountingUpstream, chat, gateway, http, send

pytestmark = pytest.mark.virtual_time

__all__ = ["gateway"]  # a fixture

LIMIT = 0.1  # s
GOOD = chat()
LENGTH = b"content-length: %d\r\n" % len(GOOD)
CHUNKED = POST + b"transfer-encoding: chunked\r\n"
WHOLE = b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)


def headed(line: bytes) -> bytes:
    """A valid request but for one more header line."""
    return POST + line + b"\r\n" + LENGTH + b"\r\n" + GOOD


def targeted(line: bytes) -> bytes:
    """A valid request but for the request line."""
    return line + b"\r\nhost: localhost\r\n" + LENGTH + b"\r\n" + GOOD


def hosted(host: bytes) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\n" + host + LENGTH + b"\r\n" + GOOD


MORE_FRAMING = {
    "TE before CL": CHUNKED + LENGTH + b"\r\n" + WHOLE,
    "TE after CL": POST + LENGTH + b"transfer-encoding: chunked\r\n\r\n" + WHOLE,
    "two equal content-lengths": POST + LENGTH * 2 + b"\r\n" + GOOD,
    "a list of content-lengths": POST + b"content-length: 5, 5\r\n\r\nhello",
    "a hexadecimal content-length": POST + b"content-length: 0x5\r\n\r\nhello",
    "a content-length with a space": POST + b"content-length: 5 5\r\n\r\nhello",
    "a content-length with an underscore": POST + b"content-length: 1_0\r\n\r\nhellohello",
    "a decimal content-length": POST + b"content-length: 5.0\r\n\r\nhello",
    "an exponent as content-length": POST + b"content-length: 1e1\r\n\r\nhellohello",
    "an empty content-length": POST + b"content-length:\r\n\r\n",
    "a content-length of 21 digits": POST + b"content-length: 100000000000000000000\r\n\r\n",
    "a content-length of 2^64": POST + b"content-length: 18446744073709551616\r\n\r\n",
    "an Arabic digit as content-length": POST + "content-length: ٥\r\n\r\nhello".encode(),
    "a semicolon in content-length": POST + b"content-length: 5;x\r\n\r\nhello",
    "identity coding": POST + b"transfer-encoding: identity\r\n\r\n",
    "chunked in the middle": POST + b"transfer-encoding: chunked, gzip\r\n\r\n",
    "gzip, chunked": POST + b"transfer-encoding: gzip, chunked\r\n\r\n" + WHOLE,
    "xchunked": POST + b"transfer-encoding: xchunked\r\n\r\n" + WHOLE,
    "chunked in quotes": POST + b'transfer-encoding: "chunked"\r\n\r\n' + WHOLE,
    "chunked with a vertical tab": POST + b"transfer-encoding: \x0bchunked\r\n\r\n" + WHOLE,
    "chunked with a NUL": POST + b"transfer-encoding: chunked\0\r\n\r\n" + WHOLE,
    "two transfer-encodings": CHUNKED + b"transfer-encoding: identity\r\n\r\n" + WHOLE,
    "a space before the TE's colon": POST + b"transfer-encoding : chunked\r\n\r\n" + WHOLE,
    "a folded TE": POST + b"transfer-encoding:\r\n chunked\r\n\r\n" + WHOLE,
    "TE and a folded CL": CHUNKED + b"x: y\r\n content-length: 5\r\n\r\n" + WHOLE,
    "a negative chunk size": CHUNKED + b"\r\n-5\r\nhello\r\n0\r\n\r\n",
    "a chunk size with plus": CHUNKED + b"\r\n+5\r\nhello\r\n0\r\n\r\n",
    "a chunk size with 0x": CHUNKED + b"\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "a chunk size with an underscore": CHUNKED + b"\r\n0_5\r\nhello\r\n0\r\n\r\n",
    "a chunk size of 17 digits": CHUNKED + b"\r\n10000000000000005\r\nhello\r\n0\r\n\r\n",
    "an empty chunk size": CHUNKED + b"\r\n\r\nhello\r\n0\r\n\r\n",
    "a space before a chunk size": CHUNKED + b"\r\n 5\r\nhello\r\n0\r\n\r\n",
    "a chunk longer than its size": CHUNKED + b"\r\n3\r\nhello\r\n0\r\n\r\n",
    "a chunk without its CRLF": CHUNKED + b"\r\n5\r\nhello0\r\n\r\n",
    "a chunk size ended by LF": CHUNKED + b"\r\n5\nhello\r\n0\r\n\r\n",
    "a chunk ended by LF": CHUNKED + b"\r\n5\r\nhello\n0\r\n\r\n",
    "a chunk size ended by CR": CHUNKED + b"\r\n5\rhello\r\n0\r\n\r\n",
    "a chunk extension of 64 KiB": CHUNKED + b"\r\n5;" + b"x" * 65_536 + b"\r\nhello\r\n0\r\n\r\n",
    "a chunk extension of 1 MB": CHUNKED + b"\r\n5;" + b"x" * 1_000_000 + b"\r\nhello\r\n0\r\n\r\n",
    "a chunk extension with a NUL": CHUNKED + b"\r\n5;\0\r\nhello\r\n0\r\n\r\n",
    "extensions of each chunk": CHUNKED + b"\r\n" + (b"1;" + b"x" * 1000 + b"\r\na\r\n") * 100 + b"0\r\n\r\n",
    "one-byte chunks": CHUNKED + b"\r\n" + b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n",
    "a trailer of 64 KiB": CHUNKED + b"\r\n0\r\nx: " + b"y" * 65_536 + b"\r\n\r\n",
    "2,000 trailers": CHUNKED + b"\r\n0\r\n" + b"x: y\r\n" * 2000 + b"\r\n",
    "a trailer that is none": CHUNKED + b"\r\n0\r\nno colon\r\n\r\n",
    "chunks over the limit": CHUNKED + b"\r\n" + (b"10000\r\n" + b"x" * 65_536 + b"\r\n") * 20 + b"0\r\n\r\n",
    "chunks on HTTP/1.0 with keep-alive": targeted(b"POST /v1/chat/completions HTTP/1.0").replace(
        LENGTH, b"connection: keep-alive\r\ntransfer-encoding: chunked\r\n"
    ),
}

HEADS = {
    "no host": hosted(b""),
    "two hosts": hosted(b"host: localhost\r\nhost: localhost\r\n"),
    "two different hosts": hosted(b"host: localhost\r\nhost: evil.example\r\n"),
    "an empty host": hosted(b"host:\r\n"),
    "a host with a space": hosted(b"host: a b\r\n"),
    "a host with a path": hosted(b"host: localhost/v1\r\n"),
    "a host with a user": hosted(b"host: x@localhost\r\n"),
    "a list of hosts": hosted(b"host: localhost, localhost:1\r\n").replace(b", ", b",\t"),
    "a host with two ports": hosted(b"host: localhost:1:2\r\n"),
    "a host with a port that is none": hosted(b"host: localhost:http\r\n"),
    "half an IPv6 host": hosted(b"host: [::1\r\n"),
    "a host in UTF-8": hosted("host: löcalhost\r\n".encode()),
    "a host with a NUL": hosted(b"host: localhost\0.evil.example\r\n"),
    "a foreign host": hosted(b"host: evil.example\r\n"),
    "a foreign host with our port": hosted(b"host: evil.example:8080\r\n"),
    "a host that begins like ours": hosted(b"host: localhost.evil.example\r\n"),
    "a host that ends like ours": hosted(b"host: evil-localhost\r\n"),
    "a private address as host": hosted(b"host: 192.168.0.1\r\n"),
    "the metadata service as host": hosted(b"host: 169.254.169.254\r\n"),
    "a foreign origin": headed(b"origin: http://evil.example"),
    "a null origin": headed(b"origin: null"),
    "an origin of another port": headed(b"origin: http://localhost:1"),
    "an origin with our name within": headed(b"origin: http://localhost.evil.example"),
    "an origin with a user": headed(b"origin: http://localhost@evil.example"),
    "an origin of a file": headed(b"origin: file://"),
    "an origin of an extension": headed(b"origin: chrome-extension://abcdef"),
    "two origins": headed(b"origin: http://localhost http://evil.example"),
    "2,000 header lines": POST + b"x: y\r\n" * 2000 + LENGTH + b"\r\n" + GOOD,
    "129 headers": POST + b"x: y\r\n" * 128 + LENGTH + b"\r\n" + GOOD,
    "many long headers": POST + (b"x: " + b"y" * 1000 + b"\r\n") * 40 + LENGTH + b"\r\n" + GOOD,
    "a header name of 20 KiB": headed(b"x" * 20_480 + b": y"),
    "a header name of 1 MB": headed(b"x" * 1_000_000 + b": y"),
    "a cookie of 20 KiB": headed(b"cookie: " + b"y" * 20_480),
    "a folded header": headed(b"x: y\r\n z"),
    "a line without a colon": headed(b"no colon"),
    "an empty name": headed(b": y"),
    "a space in a name": headed(b"a b: y"),
    "a tab in a name": headed(b"a\tb: y"),
    "a NUL in a name": headed(b"a\0b: y"),
    "a parenthesis in a name": headed(b"a(b: y"),
    "a byte above 127 in a name": headed(b"a\xe4: y"),
    "a space before the first header": POST.replace(b"host", b" host") + LENGTH + b"\r\n" + GOOD,
    "a bare CR in a value": headed(b"x: a\rb"),
    "a bare CR before a name": headed(b"x: a\rcontent-length: 1"),
    "a DEL in a value": headed(b"x: a\x01b"),
    "an escape in a value": headed(b"x: \x1b[31m"),
    "lines ended by LF": targeted(b"POST /v1/chat/completions HTTP/1.1").replace(b"\r\n", b"\n"),
    "lines ended by CR": targeted(b"POST /v1/chat/completions HTTP/1.1").replace(b"\r\n", b"\r"),
}

LINES = {
    "no version": targeted(b"POST /v1/chat/completions"),
    "HTTP/0.9": targeted(b"POST /v1/chat/completions HTTP/0.9"),
    "HTTP/2.0": targeted(b"POST /v1/chat/completions HTTP/2.0"),
    "HTTP/1.2": targeted(b"POST /v1/chat/completions HTTP/1.2"),
    "HTTP/11": targeted(b"POST /v1/chat/completions HTTP/11"),
    "http/1.1": targeted(b"POST /v1/chat/completions http/1.1"),
    "HTTP/1.1x": targeted(b"POST /v1/chat/completions HTTP/1.1x"),
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a tab": targeted(b"POST\t/v1/chat/completions HTTP/1.1"),
    "a space in the target": targeted(b"POST /v1/chat completions HTTP/1.1"),
    "no target": targeted(b"POST HTTP/1.1"),
    "a relative target": targeted(b"POST v1/chat/completions HTTP/1.1"),
    "a NUL in the target": targeted(b"POST /v1/chat/completions\0 HTTP/1.1"),
    "a target of 20 KiB": targeted(b"POST /" + b"x" * 20_480 + b" HTTP/1.1"),
    "a query of 1 MB": targeted(b"POST /v1/chat/completions?" + b"x" * 1_000_000 + b" HTTP/1.1"),
    "an unknown method": targeted(b"FROB /v1/chat/completions HTTP/1.1"),
    "a method in lower case": targeted(b"post /v1/chat/completions HTTP/1.1"),
    "a method of 1 MB": targeted(b"P" * 1_000_000 + b" /v1/chat/completions HTTP/1.1"),
    "TRACE": b"TRACE /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "CONNECT": b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "OPTIONS *": b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "PROPFIND": targeted(b"PROPFIND /v1/models HTTP/1.1"),
    "POST to a GET": targeted(b"POST /v1/models HTTP/1.1"),
    "DELETE of a GET": targeted(b"DELETE /health HTTP/1.1"),
    "a GET with a large body": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000\r\n\r\n",
    "a GET with chunks": b"GET /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel",
    "the PROXY protocol": b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n" + headed(b"x: y"),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "SMTP": b"EHLO evil.example\r\n\r\n",
    "Redis": b"*1\r\n$4\r\nINFO\r\n",
    "SOCKS": b"\x05\x01\x00\r\n\r\n",
    "NULs": b"\0" * 100,
    "a byte order mark": b"\xef\xbb\xbf" + headed(b"x: y"),
}

MORE_PATHS = [
    *(
        "/v1/completions/",
        "/v1/chat",
        "/v1/chat/completions/x",
        "/v1/chat/completions/..",
        "/v1/chat/completions/.",
        "/v2/models",
    ),
    *("/%2e%2e/v1/chat/completions", "/v1/%2e/chat/completions", "/v1/chat%252fcompletions", "/v1\\chat\\completions"),
    *(
        "/v1/chat/completions%0d%0ax:%20y",
        "/v1/chat/completions%ff",
        "/v1/chat/completions.",
        "/v1/chat/completions.json",
    ),
    *(
        "http://169.254.169.254/latest/meta-data/",
        "http://user:secret@127.0.0.1/v1/nope",
        "https://evil.example/",
        "/.env",
    ),
    *("/.git/config", "/admin", "/reload", "/explain", "/ttft", "/dashboard", "/routes", "/v1/responses", "/v1/files"),
    *("/v1/audio/speech", "/v1/images/generations", "/v1/moderations", "/v1/messages", "/tokenize", "/detokenize"),
    *("/collective_rpc", "/reset_prefix_cache", "/wake_up", "/update_weights", "/generate", "/v1/unload_lora_adapter"),
]

ENCODINGS = {
    **{
        coding: headed(f"content-encoding: {coding}".encode()) for coding in ("gzip", "deflate", "br", "zstd", "x-gzip")
    },
    "gzip twice": headed(b"content-encoding: gzip, gzip"),
    "identity, gzip": headed(b"content-encoding: identity, gzip"),
    "an unknown one": headed(b"content-encoding: rot13"),
    **{f"{codec} text": http(GOOD.decode().encode(codec)) for codec in ("utf-16-le", "utf-16-be", "utf-32-be")},
    "Latin-1": http('{"model":"chat","messages":[{"role":"user","content":"ä"}]}'.encode("latin-1")),
    "an overlong slash": http(b'{"model":"chat","messages":[{"role":"user","content":"\xc0\xaf"}]}'),
    "a surrogate in UTF-8": http(b'{"model":"chat","messages":[{"role":"user","content":"\xed\xa0\x80"}]}'),
    "beyond Unicode": http(b'{"model":"chat","messages":[{"role":"user","content":"\xf5\x80\x80\x80"}]}'),
    "half a character": http(b'{"model":"chat","messages":[{"role":"user","content":"\xe2\x82"}]}'),
    "a NUL before": http(b"\0" + GOOD),
    "a control character": http(b'{"model":"chat","messages":[{"role":"user","content":"\x01"}]}'),
    "a form": http(b"model=chat&messages=hello", extra=b"content-type: application/x-www-form-urlencoded\r\n"),
    "multipart": http(b"--x\r\n\r\nhello\r\n--x--\r\n", extra=b"content-type: multipart/form-data; boundary=x\r\n"),
}

VALUES = {
    f"{name}: {value}": http(GOOD, extra=f"{name}: {value}\r\n".encode())
    for name, value in [
        *(("x-slo-ttft-ms", value) for value in ("soon", "-1", "0", "NaN", "inf", "1e400", "0x10", "")),
        *(("x-slo-tpot-ms", value) for value in ("NaN", "-5", "fast")),
        *(("x-priority", value) for value in ("high", "1.5", "1e3")),
    ]
}

REQUESTS: dict[str, bytes] = {
    **{f"body: {name}": http(body) for name, body in BODIES.items()},
    **{f"path: {path}": http(GOOD, path=path) for path in (*PATHS, *MORE_PATHS)},
    **{f"framing: {name}": raw for name, raw in {**FRAMING, **MORE_FRAMING}.items()},
    **{f"head: {name}": raw for name, raw in HEADS.items()},
    **{f"line: {name}": raw for name, raw in LINES.items()},
    **{f"encoding: {name}": raw for name, raw in ENCODINGS.items()},
    **{f"value: {name}": raw for name, raw in VALUES.items()},
}


def test_there_are_two_hundred() -> None:
    assert len(REQUESTS) >= 200


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_hostile_request_is_refused_at_once(name: str, gateway: tuple[Gateway, CountingUpstream]) -> None:
    """The best of ten times counts: a test machine may pause."""
    front, upstream = gateway
    took = []
    while len(took) < 10 and (not took or min(took) > LIMIT):
        begun = monotonic()
        status, _, body = await send(front, REQUESTS[name])
        took.append(monotonic() - begun)
        assert 400 <= status < 500
        assert json.loads(body)["error"]["message"]
    await asyncio.sleep(0)
    assert upstream.connections == 0
    assert min(took) <= LIMIT
