"""Connects to a host name: its addresses race (RFC 8305), and the first connection wins.

Attempts start ATTEMPT_DELAY apart, IPv6 and IPv4 in turn, or at once after a failed one: an address that nobody answers
costs a quarter of a second, not the whole connect timeout. The other attempts end and their sockets are closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from aiohappyeyeballs import start_connection

from backends.failures import ForbiddenAddressError

ATTEMPT_DELAY = 0.25  # s; RFC 8305, section 5


async def connected_socket(
    host: str, port: int, allowed: Callable[[str], bool] = lambda address: True
) -> socket.socket:
    """A socket connected to an allowed address of the host. Raises OSError, or UnicodeError for a malformed name."""
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    usable = [answer for answer in answers if allowed(str(answer[4][0]))]
    if not usable:
        raise ForbiddenAddressError
    try:
        return await start_connection(usable, happy_eyeballs_delay=ATTEMPT_DELAY)
    except RuntimeError as error:  # uvloop, in place of an OSError
        raise OSError(str(error)) from error
