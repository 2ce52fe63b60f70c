"""Certificate and key of the data port.

The end of a certificate is read from its DER (RFC 5280, 4.1): the standard library tells it of verified peers alone.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Self

from pydantic import model_validator

from gateway.config.field_types import Section

MISMATCH = "KEY_VALUES_MISMATCH"  # OpenSSL's reason


class ServerTlsSection(Section):
    """TLS of the data port, PEM files; read again when they change."""

    certificate: str
    """Certificate with its chain."""
    key: str
    """Private key of the certificate, without a passphrase."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        self.context()
        return self

    @property
    def files(self) -> tuple[Path, Path]:
        return Path(self.certificate), Path(self.key)

    def context(self) -> ssl.SSLContext:
        """TLS 1.2 and later. Raises ValueError for files that cannot be used.

        Sessions are not resumed: every new connection presents the certificate in force.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.set_alpn_protocols(["http/1.1"])
        for name, path in zip(("certificate", "key"), self.files, strict=True):
            try:
                path.open("rb").close()
            except OSError as error:
                raise ValueError(f"{name}: '{path}' cannot be read: {error.strerror}") from None
        try:
            context.load_cert_chain(*self.files, password="")  # a passphrase would be asked for on the terminal
        except ssl.SSLError as error:
            raise ValueError(_reason(error)) from None
        return context

    def end(self) -> float:
        """Unix time at which the certificate, or one of its chain, ends; infinite where the file does not tell it."""
        try:
            return certificates_end(Path(self.certificate).read_text("utf-8", "replace"))
        except (OSError, ValueError, IndexError):
            return inf


def _reason(error: ssl.SSLError) -> str:
    if error.reason == MISMATCH:
        return "the key is not that of the certificate"
    return f"not a PEM certificate and a PEM key without a passphrase: {error.reason or 'unreadable'}"


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
