"""Seals: provider state of a turn, encoded in the opaque state member of the caller's dialect.

    ftst1-<12 hex digits: the maker><base64url of JSON: the state>

Rules:
- The maker is a digest of the account and the model that wrote the turn, and reveals no name and no key.
- The state is the provider's, bit for bit. The maker gets the state back unchanged; every other pool goes without.
- Nothing is stored: every gateway with the same pools opens a seal, also after a restart. A forged seal gains nothing:
  the caller can send the same state to the provider unsealed.
- The alphabet is that of the narrowest member, a call id in Messages.
- Seals of a history hold at most MOST_ELEMENTS in total, a bound like that of a body.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

MARK = "ftst1-"
MARK_BYTES = MARK.encode()
MAKER = 12  # hex digits
MOST_ELEMENTS = 300_000  # values, arrays and objects: 20 MB and 50 ms; a state has some dozens
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened seal."""

    maker: str
    state: Any


def maker_of(account: str, model: str) -> str:
    """The digest of an account and a model. `account`: a key, or the address of a server without keys."""
    return sha256(f"maker of turns\0{account}\0{model}".encode()).hexdigest()[:MAKER]


def sealed(maker: str, state: Any) -> str:
    return MARK + maker + urlsafe_b64encode(_encode(state)).rstrip(b"=").decode()


class Opener:
    """Decodes the seals of one history."""

    def __init__(self) -> None:
        self._left = MOST_ELEMENTS

    def opened(self, text: Any) -> Opened | None:
        """Decode a seal. None: not a seal, damaged, or beyond the limit of MOST_ELEMENTS per history."""
        if not isinstance(text, str) or not text.startswith(MARK):
            return None
        try:
            data = _written(text)
            self._left -= data.count(b",") + data.count(b"[") + data.count(b"{")
            state = _decode(data) if self._left >= 0 else None
        except (ValueError, RecursionError):
            return None
        return Opened(text[len(MARK) : len(MARK) + MAKER], state) if self._left >= 0 else None


class _OfCall(msgspec.Struct):
    id: str


_of_call = msgspec.json.Decoder(_OfCall).decode


def id_of_call(text: str) -> str:
    """The server's own id in the seal of a call, whose state is not decoded; empty: no seal, or no id in it."""
    try:
        return _of_call(_written(text)).id if text.startswith(MARK) else ""
    except (ValueError, RecursionError):
        return ""


def _written(text: str) -> bytes:
    """The JSON in a seal. Raises ValueError."""
    data = text[len(MARK) + MAKER :]
    return urlsafe_b64decode(data + "=" * (-len(data) % 4))


FOREIGN = sealed("-" * MAKER, None)  # of no maker: left out for every pool


def is_seal(text: Any) -> bool:
    return isinstance(text, str) and text.startswith(MARK)
