"""Network time to a server, as connections show it that are opened anyway: nothing is sent for it.

Rules:
- A round trip is the least that the kernel has measured on a connection in its last minutes (Linux: tcp_info of
  <linux/tcp.h>, `tcpi_min_rtt`), from the handshake on. Elsewhere it is the time to connect over the round trips which
  that takes: an upper bound.
- Of all connections of this window and the one before, the least counts: queues only ever add to it. A longer way is
  learned within two windows.
- Behind a proxy it is not known: the connection ends there.
- A new connection costs `setup_s`: the median of the latest, with DNS and TLS.
"""

from __future__ import annotations

import socket
from collections import deque
from math import inf
from statistics import median
from struct import Struct, error

TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_MIN_RTT = Struct("=148xI")  # us, since Linux 4.6
_RTT = Struct("=68xI")  # us, smoothed
_UNKNOWN = 0xFFFF_FFFF  # of a connection without a sample
WINDOW = 300.0  # s: as long as the kernel's own (tcp_min_rtt_wlen)
READ_EVERY = 1.0  # s between two looks at a connection that becomes idle: a look takes 1 us
CONNECTS = 9  # latest connections whose setup counts
TRIPS_OF_TLS = 1  # round trips of a TLS 1.3 handshake (RFC 8446, figure 1), beside that of TCP


class NetworkTime:
    """`measures`: the other end of the connections is the server itself."""

    def __init__(self, measures: bool = True) -> None:
        self.read_at = -inf  # from when on a connection is looked at again
        self.rtt = 0.0  # s of a round trip; 0: not known
        self.setup_s = 0.0  # to open a connection; 0: none was opened yet
        self._measures = measures
        self._setups = deque[float](maxlen=CONNECTS)
        self._least = self._least_before = inf  # s, of this window and the one before
        self._window_ends = -inf

    def on_connected(self, sock: socket.socket, seconds: float, *, tls: bool, now: float) -> None:
        """A connection was opened in so many seconds."""
        self._setups.append(seconds)
        self.setup_s = median(self._setups)
        if self._measures:
            self._add(kernel_rtt(sock) or seconds / (1 + TRIPS_OF_TLS * tls), now)

    def on_idle(self, sock: socket.socket, now: float) -> None:
        """A connection has carried a request to its end. To be called from `read_at` on."""
        self.read_at = now + READ_EVERY
        if self._measures and (rtt := kernel_rtt(sock)):
            self._add(rtt, now)

    def _add(self, seconds: float, now: float) -> None:
        if now > self._window_ends:
            is_next = now <= self._window_ends + WINDOW
            self._least_before, self._least = (self._least if is_next else inf), inf
            self._window_ends = now + WINDOW
        self._least = min(self._least, seconds)
        self.rtt = min(self._least, self._least_before)


def kernel_rtt(sock: socket.socket) -> float | None:
    """Least round trip of a connection, s; None: this system does not tell."""
    if TCP_INFO is None:
        return None
    try:
        found = sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
        [least] = (_MIN_RTT if len(found) >= _MIN_RTT.size else _RTT).unpack_from(found)
    except (OSError, error):
        return None
    return least / 1e6 if 0 < least < _UNKNOWN else None
