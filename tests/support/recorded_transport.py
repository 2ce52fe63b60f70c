"""A caller's transport that records writes."""

from __future__ import annotations

import asyncio

from backends.http.connection import WriteCoalescer


class Wire(asyncio.Transport):
    """The client's transport: records writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.gone = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        assert not self.gone
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.gone

    def abort(self) -> None:
        self.gone = True

    @property
    def head(self) -> dict[str, str]:
        first, *lines = self.writes[0].partition(b"\r\n\r\n")[0].decode().split("\r\n")
        return {"": first, **{name: value for name, _, value in (line.partition(": ") for line in lines)}}

    @property
    def body(self) -> bytes:
        return b"".join(self.writes).partition(b"\r\n\r\n")[2]


class AtOnce(WriteCoalescer):
    """Writes immediately, without coalescing."""

    def write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        transport.write(data)
