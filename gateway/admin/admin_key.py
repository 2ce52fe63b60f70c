"""The check of `server.admin_key`, which the paths that change callers' keys require.

Rules:
- Keys are compared by digest, in constant time. An absent and a wrong key get the same answer.
- An address has ATTEMPTS wrong keys a minute. Beyond, its requests are refused without a look at the key, so that the
  answer tells nothing of it. A right key from another address is not delayed.
- Addresses are those of connections, of IPv6 networks. The ADDRESSES that failed last are remembered.
"""

from __future__ import annotations

import hmac
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import sha256
from time import monotonic

from gateway.api.api_error import ApiError, retry_later
from policies.rate_limit.bucket import RateLimit

log = logging.getLogger("firsttoken")

ATTEMPTS = 6
ADDRESSES = 1_024


class AdminKey:
    def __init__(self, key: str, clock: Callable[[], float] = monotonic) -> None:
        self._digest, self._clock = _digest(key), clock
        self._failed: OrderedDict[str, RateLimit] = OrderedDict()  # by address

    def check(self, headers: Mapping[str, str], address: str) -> None:
        """Raises ApiError (401, 429). `headers`: names in lower case."""
        now = self._clock()
        attempts = self._failed.get(address) or RateLimit.configured(False, ATTEMPTS)
        if (wait := attempts.wait(0, now)) > 0:
            text = "Too many wrong admin keys came from this address."
            raise ApiError(429, text, type="rate_limit_error", code="rate_limit_exceeded", headers=retry_later(wait))
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(_digest(key.strip()), self._digest):
            return
        self._failed[address] = attempts.after(0, now)
        self._failed.move_to_end(address)
        if len(self._failed) > ADDRESSES:
            self._failed.popitem(last=False)
        log.warning("admin port: a wrong admin key, or none, from %s", address)
        text = "This path requires the admin key: authorization: Bearer <server.admin_key>."
        raise ApiError(401, text, code="invalid_admin_key", headers={"www-authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
