"""Certificate and key of the data port."""

from __future__ import annotations

import ssl
from math import inf
from pathlib import Path
from typing import Self

from pydantic import model_validator

from backends.http.certificate_end import certificates_end
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
