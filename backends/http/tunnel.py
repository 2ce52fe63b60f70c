"""A tunnel to a backend through an HTTP proxy: CONNECT (RFC 9110, 9.3.6).

TLS with the backend begins inside the tunnel: the proxy reads neither prompts nor keys. Nothing of a request is
written before the proxy has agreed.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import unquote, urlsplit

from backends.failures import ProxyError
from backends.http.name_lookup import connected_socket

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: [^\r\n]*)?\r\n")
HEAD_LIMIT = 16 * 1024  # bytes of the proxy's reply


@dataclass(frozen=True, slots=True)
class ProxyAddress:
    """A parsed proxy URL."""

    host: str
    port: int
    authorization: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str) -> ProxyAddress:
        """Parse http://[USER:PASSWORD@]HOST:PORT. Raises ValueError, without the URL in its message."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        odd = parts.path not in ("", "/") or parts.query or parts.fragment
        if parts.scheme != "http" or not host or odd or any(c <= " " or c == "\x7f" for c in url):
            raise ValueError("not the URL of an HTTP proxy; write it like http://proxy.internal:3128")
        credentials = parts.netloc.rpartition("@")[0]
        basic = b64encode(unquote(credentials).encode()).decode()
        return cls(host, port or 3128, f"Basic {basic}" if credentials else "")

    def request(self, target: str) -> bytes:
        """Head of the CONNECT request. `target`: host:port."""
        head = f"CONNECT {target} HTTP/1.1\r\nhost: {target}\r\nuser-agent: firsttoken\r\n"
        if self.authorization:
            head += f"proxy-authorization: {self.authorization}\r\n"
        return f"{head}\r\n".encode("latin-1")


class ProxyHandshake(asyncio.Protocol):
    """Sends the CONNECT request and reads the proxy's reply; `agreed` ends with the transport, or a ProxyError."""

    def __init__(self, request: bytes) -> None:
        self.agreed: asyncio.Future[asyncio.Transport] = asyncio.get_running_loop().create_future()
        self._request = request
        self._reply = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._reply += data
        if (end := self._reply.find(b"\r\n\r\n")) >= 0:
            self._end(self._judged(bytes(self._reply), end + 4))
        elif len(self._reply) > HEAD_LIMIT:
            self._end(ProxyError())

    def connection_lost(self, error: Exception | None) -> None:
        self._end(ProxyError())

    def _judged(self, reply: bytes, end: int) -> ProxyError | None:
        """None: agreed. Bytes behind the head would be taken for the backend's."""
        match = _STATUS.match(reply)
        status = int(match[1]) if match else 0
        return None if 200 <= status < 300 and end == len(reply) else ProxyError(status)

    def _end(self, error: ProxyError | None) -> None:
        if self.agreed.done():
            return
        if error is None and self._transport is not None:
            self._transport.pause_reading()
            self.agreed.set_result(self._transport)
        else:
            self.agreed.set_exception(error or ProxyError())


async def open_tunnel(proxy: ProxyAddress, target: str, within: float) -> asyncio.Transport:
    """Transport of a tunnel to `target`, reading paused. `within`: s that the caller waits for it. Raises OSError."""
    loop = asyncio.get_running_loop()
    sock = await connected_socket(proxy.host, proxy.port, within)
    transport, handshake = await loop.create_connection(lambda: ProxyHandshake(proxy.request(target)), sock=sock)
    try:
        return await handshake.agreed
    except BaseException:
        transport.abort()
        raise
