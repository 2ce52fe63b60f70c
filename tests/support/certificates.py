"""A certificate authority for one test run, by openssl, with certificates for localhost and for a client."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

_EXTENSIONS = """\
[ca]
basicConstraints=critical,CA:TRUE
keyUsage=critical,keyCertSign
[server]
subjectAltName=DNS:localhost,IP:127.0.0.1
[client]
extendedKeyUsage=clientAuth
"""


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class Certificates:
    """PEM files. `server` and `client` hold the key too; `client_only` and `client_key` are apart."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def server(self) -> Path:
        return self.folder / "server.both.pem"

    @property
    def client(self) -> Path:
        return self.folder / "client.both.pem"

    @property
    def client_only(self) -> Path:
        return self.folder / "client.pem"

    @property
    def client_key(self) -> Path:
        return self.folder / "client.key"

    def serving(self, *, mutual: bool = False) -> ssl.SSLContext:
        """Of a server; `mutual`: it demands a client certificate of this authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server)
        if mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.ca)
        return context


def made(folder: Path, server_days: int = 2) -> Certificates:
    """`server_days`: validity of the server's certificate; below 0 it has expired."""
    folder.mkdir(exist_ok=True)
    extensions = folder / "extensions.cnf"
    extensions.write_text(_EXTENSIONS)
    curve = "ec_paramgen_curve:prime256v1"
    for name in ("ca", "server", "client"):
        key, request, pem = (folder / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", curve, "-out", key)
        _openssl("req", "-new", "-key", key, "-subj", f"/CN={name}", "-out", request)
        signer = ["-signkey", key] if name == "ca" else ["-CA", folder / "ca.pem", "-CAkey", folder / "ca.key"]
        serial = [] if name == "ca" else ["-CAcreateserial"]
        days = server_days if name == "server" else 2
        _openssl(
            *("x509", "-req", "-in", request, *signer, *serial, "-days", str(days), "-out", pem),
            *("-extfile", extensions, "-extensions", name),
        )
        (folder / f"{name}.both.pem").write_text(key.read_text() + pem.read_text())
    return Certificates(folder)
