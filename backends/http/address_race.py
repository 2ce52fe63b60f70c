"""Connects to a host name: its addresses race (RFC 8305), and the first connection wins.

Attempts start ATTEMPT_DELAY apart, IPv6 and IPv4 in turn, or at once after a failed one: an address that nobody answers
costs a quarter of a second, not the whole connect timeout. The other attempts end and their sockets are closed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from aiohappyeyeballs import start_connection

from backends.failures import ForbiddenAddressError
from backends.http.name_lookup import AddressInfo, NameLookup

ATTEMPT_DELAY = 0.25  # s; RFC 8305, section 5
NAME_SHARE = 0.5  # of the time to connect: the rest is for the server, which is not to blame for the DNS
CONNECT_NAMES = NameLookup()


async def connected_socket(
    host: str, port: int, within: float, allowed: Callable[[str], bool] = lambda address: True
) -> socket.socket:
    """A socket connected to an allowed address of the host. `within`: s that the caller waits for it. Raises OSError,
    or UnicodeError for a malformed name."""
    answers = await CONNECT_NAMES.usable(host, within * NAME_SHARE)
    usable = [_with_port(answer, port) for answer in answers if allowed(str(answer[4][0]))]
    if not usable:
        raise ForbiddenAddressError
    try:
        return await start_connection(usable, happy_eyeballs_delay=ATTEMPT_DELAY)
    except RuntimeError as error:  # uvloop, in place of an OSError
        raise OSError(str(error)) from error


def _with_port(answer: AddressInfo, port: int) -> AddressInfo:
    family, kind, protocol, name, (address, _, *rest) = answer
    return family, kind, protocol, name, (address, port, *rest)
