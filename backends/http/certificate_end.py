"""The end of certificates in a PEM file, by their DER (RFC 5280, 4.1): the standard library tells it of verified peers
alone."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x30, 0x17, 0x18, 0xA0
_BEFORE_VALIDITY = 3  # serial number, signature algorithm, issuer


def certificates_end(pem: str) -> float:
    """Unix time at which the first of the certificates ends: a chain is no longer than its shortest link. Raises
    ValueError."""
    ends = [_end(ssl.PEM_cert_to_DER_cert(found)) for found in _PEM.findall(pem)]
    if not ends:
        raise ValueError("no certificate")
    return min(ends)


def _end(der: bytes) -> float:
    certificate = _content(der, 0, _SEQUENCE)[0]
    fields = _content(certificate, 0, _SEQUENCE)[0]
    at = 0
    if fields[:1] == bytes([_VERSION]):
        _, at = _content(fields, 0, _VERSION)
    for _ in range(_BEFORE_VALIDITY):
        _, at = _content(fields, at)
    validity = _content(fields, at, _SEQUENCE)[0]
    _, at = _content(validity, 0)
    return _time(validity[at], _content(validity, at)[0].decode("ascii"))


def _content(der: bytes, at: int, kind: int | None = None) -> tuple[bytes, int]:
    """Content of the value at this place, and the place behind it."""
    if at + 2 > len(der) or (kind is not None and der[at] != kind):
        raise ValueError("not a certificate")
    size, begin = der[at + 1], at + 2
    if size & 0x80:
        count = size & 0x7F
        size, begin = int.from_bytes(der[begin : begin + count], "big"), begin + count
    return der[begin : begin + size], begin + size


def _time(kind: int, text: str) -> float:
    if kind == _UTC_TIME:  # years from 50 on are of the last century
        text = ("19" if text >= "5" else "20") + text
    elif kind != _GENERALIZED_TIME:
        raise ValueError("not a time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
