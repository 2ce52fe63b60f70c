"""State of one HTTP/2 stream at the server (RFC 9113, section 5.1)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum


class Half(Enum):
    """One direction of a stream. ENDING: the server has said all, and the end waits with the rest for a window."""

    OPEN = "open"
    ENDING = "ending"
    CLOSED = "closed"


@dataclass(slots=True)
class Stream:
    """`sendable`, `receivable`: bytes of the windows; the first is below 0 where the peer has made it smaller.
    `unreturned`: bytes that were read, and that the peer may not send again yet. `outbox`: waits for a window."""

    id: int
    sendable: int
    receivable: int
    peer: Half = Half.OPEN
    server: Half = Half.OPEN
    unreturned: int = 0
    outbox: deque[bytes] = field(default_factory=deque)
    unsent: int = 0  # bytes in the outbox
    is_answered: bool = False  # with DATA, if only in part
    trailers: bytes = b""

    @property
    def is_closed(self) -> bool:
        return self.peer is Half.CLOSED and self.server is Half.CLOSED

    def queue(self, data: bytes) -> None:
        self.outbox.append(data)
        self.unsent += len(data)

    def take(self, limit: int) -> bytes:
        """Up to `limit` bytes of the outbox, which is not empty."""
        piece = self.outbox.popleft()
        if len(piece) > limit:
            self.outbox.appendleft(piece[limit:])
            piece = piece[:limit]
        self.unsent -= len(piece)
        self.sendable -= len(piece)
        return piece
