"""What of a backend's answer is not for its reader: how much of the prompt was cached, and our key.

- A backend that does not keep tenants' caches apart would tell one of them what another has asked. So every number
  under a key with `cache` in it becomes 0, padded with blanks. Within text such a key's quotes are escaped, and it is
  left alone.
- Some quote our API key in an error, and send it as a 200. It becomes asterisks.
- Both keep their length, so that neither a content-length nor a frame changes; what the bytes end in the middle of is
  held back until it is whole.
"""

from __future__ import annotations

import re

from backends.stream.sse import UsageStripper

_LONGEST = 256  # bytes from a key's quote to the end of its number
_HINT = b"ache"  # of both spellings
_NUMBER = rb"[-+.\dEe]"
_COUNT = re.compile(rb'("\w*[Cc]ache\w*"\s*:\s*)(-?\d' + _NUMBER + rb"*)", re.ASCII)
_OPEN = re.compile(rb'"\w*(?:"\s*(?::\s*' + _NUMBER + rb"*)?)?\Z", re.ASCII)


class SecretMasker:
    """Of one answer that is not streamed."""

    __slots__ = ("_held", "_secret")

    def __init__(self, secret: bytes) -> None:
        self._held, self._secret = b"", secret

    @property
    def idle(self) -> bool:
        return not self._held

    def feed(self, data: bytes) -> bytes:
        """What may be sent on now."""
        data = masked(self._held + data, self._secret)
        end = len(data) if data.endswith(b"}") else _begun(data, self._secret)
        self._held = data[end:]
        return data[:end]

    def close(self) -> bytes:
        rest, self._held = self._held, b""
        return rest


def masked(data: bytes, secret: bytes) -> bytes:
    return data.replace(secret, b"*" * len(secret)) if secret and secret in data else data


def _begun(data: bytes, secret: bytes) -> int:
    """Where the secret may begin that the next read ends."""
    least = max(len(data) - len(secret) + 1, 0)
    return next((start for start in range(least, len(data)) if secret.startswith(data[start:])), len(data))


class CachedCountMasker:
    """Of one answer. `inner` has what came first."""

    __slots__ = ("_held", "_inner")

    def __init__(self, inner: UsageStripper | SecretMasker | None = None) -> None:
        self._held = b""
        self._inner = inner

    @property
    def idle(self) -> bool:
        """Nothing is held back: content may pass by."""
        return not self._held and (self._inner is None or self._inner.idle)

    def feed(self, data: bytes) -> bytes:
        """What may be sent on now."""
        data = self._held + (data if self._inner is None else self._inner.feed(data))
        cut = _OPEN.search(data, max(len(data) - _LONGEST, 0))
        end = len(data) if cut is None else cut.start()
        self._held = data[end:]
        return _hidden(data[:end])

    def close(self) -> bytes:
        """The body is over: what was held."""
        rest = self._held + (b"" if self._inner is None else self._inner.close())
        self._held = b""
        return _hidden(rest)


def _hidden(data: bytes) -> bytes:
    return _COUNT.sub(_zero, data) if _HINT in data else data


def _zero(found: re.Match[bytes]) -> bytes:
    return found[1] + b"0".ljust(len(found[2]))
