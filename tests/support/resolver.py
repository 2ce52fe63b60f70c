"""A DNS server of one name for the processes of a mount namespace: slow, or with an address that changes.

Only root on Linux can give a process another /etc/resolv.conf; `possible()` says so.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

ADDRESS = "127.53.53.53"  # of the server, on port 53


class Resolver(asyncio.DatagramProtocol):
    """An async context manager. `answer`: the address of every name; `delay`: s; `queries` counts. `dark`: names with
    these letters get no answer."""

    def __init__(self, answer: str = "127.0.0.1") -> None:
        self.answer = answer
        self.delay = 0.0
        self.dark = b""
        self.queries = 0

    async def __aenter__(self) -> Resolver:
        loop = asyncio.get_running_loop()
        self._endpoint, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(ADDRESS, 53))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._endpoint.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.queries += 1
        if self.dark and self.dark in data:
            return
        asyncio.get_running_loop().call_later(self.delay, self._reply, data, addr)

    def _reply(self, query: bytes, addr: tuple[str, int]) -> None:
        end = query.index(b"\0", 12) + 5
        wants_ipv4 = query[end - 4 : end - 2] == b"\0\x01"
        record = b"\xc0\x0c\0\x01\0\x01\0\0\0\0\0\x04" + bytes(map(int, self.answer.split("."))) if wants_ipv4 else b""
        head = query[:2] + b"\x81\x80\0\x01" + (b"\0\x01" if record else b"\0\0") + b"\0\0\0\0"
        if not self._endpoint.is_closing():
            self._endpoint.sendto(head + query[12:end] + record, addr)


def possible() -> bool:
    """True if a process can be given a resolver of its own."""
    return os.geteuid() == 0 and shutil.which("unshare") is not None and _mounts()


def _mounts() -> bool:
    command = ["unshare", "-m", "mount", "--bind", "/etc/hosts", "/etc/resolv.conf"]
    return subprocess.run(command, capture_output=True).returncode == 0


def prefix(home: Path) -> tuple[str, ...]:
    """Words before a command whose names are resolved by the Resolver."""
    (home / "resolv.conf").write_text(f"nameserver {ADDRESS}\noptions timeout:10 attempts:1\n")
    script = f'mount --bind {home}/resolv.conf /etc/resolv.conf && exec "$@"'
    return ("unshare", "-m", "sh", "-c", script, "sh")
