"""Certificates of connections to backends: a CA in place of the system's, and a client certificate (mutual TLS)."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; empty: none. `versions` tells changed files under the same names apart."""

    ca: str = ""
    certificate: str = ""
    key: str = ""
    versions: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ca: str, certificate: str, key: str) -> TlsFiles:
        stats = [Path(path).stat() for path in (ca, certificate, key) if path]
        return cls(ca, certificate, key, tuple((stat.st_mtime_ns, stat.st_size) for stat in stats))

    def context(self) -> ssl.SSLContext:
        """Raises OSError. A key with a passphrase is an error, not a question on the terminal."""
        context = ssl.create_default_context(cafile=self.ca or None)
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key or None, password="")
        return context
