"""Whom an attempt on the wire (`gateway.upstream.upstream_request`) speaks to: its owner until it has won, its
receiver from then on.

All are told in the call in which the bytes arrived, so none of them may wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from backends.interface import Failure

if TYPE_CHECKING:
    from gateway.upstream.upstream_request import UpstreamRequest


class BodySink(Protocol):
    """Where a committed answer goes."""

    def body(self, data: bytes) -> None: ...

    def chunk(self, data: bytes, framed: bytes) -> None:
        """Content and nothing else, that was read as one chunk: `framed` as it was."""
        ...

    def end(self) -> None: ...

    def on_broken(self, failure: Failure) -> None: ...

    def on_error_event(self, data: bytes, failure: Failure) -> None:
        """The backend's own error event is in `data`; nothing follows."""
        ...


class AttemptListener(Protocol):
    """Told what an attempt comes to, before any of it reaches the client."""

    def first_token(self, run: UpstreamRequest) -> None: ...

    def failed(self, run: UpstreamRequest, failure: Failure) -> None: ...


class _Nobody:
    """The owner of an attempt that is over."""

    def first_token(self, run: UpstreamRequest) -> None:
        """It came too late for anybody."""

    def failed(self, run: UpstreamRequest, failure: Failure) -> None:
        """So did this."""


DETACHED = _Nobody()
