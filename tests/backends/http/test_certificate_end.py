"""The end of certificates, compared with openssl."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from gateway.config.server_tls import certificates_end


def certificate(path: Path, days: int, kind: str) -> tuple[str, float]:
    """PEM and end."""
    options = f"req -x509 -newkey {kind} -nodes -days {days} -subj /CN=localhost -keyout {path}.key -out {path}"
    subprocess.run(["openssl", *options.split()], check=True, capture_output=True)
    shown = subprocess.run(
        ["openssl", "x509", "-enddate", "-noout", "-in", str(path)], check=True, capture_output=True, text=True
    )
    return path.read_text(), float(ssl.cert_time_to_seconds(shown.stdout.strip().removeprefix("notAfter=")))


@pytest.mark.parametrize("days", [1, 90, 20_000], ids=["soon", "usual", "after 2050"])
@pytest.mark.parametrize("kind", ["rsa:2048", "ec -pkeyopt ec_paramgen_curve:P-256"], ids=["RSA", "EC"])
def test_the_end_is_that_which_openssl_tells(days: int, kind: str, tmp_path: Path) -> None:
    """From 2050 on the time has another form."""
    pem, end = certificate(tmp_path / "a.pem", days, kind)
    assert certificates_end(f"a comment\n{pem}") == end


def test_a_chain_ends_with_the_first_of_its_certificates(tmp_path: Path) -> None:
    kind = "ec -pkeyopt ec_paramgen_curve:P-256"
    (long, _), (short, end) = (certificate(tmp_path / f"{days}.pem", days, kind) for days in (300, 3))
    assert certificates_end(long + short) == certificates_end(short + long) == end


@pytest.mark.parametrize("pem", ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"])
def test_what_is_no_certificate_is_an_error(pem: str) -> None:
    with pytest.raises(ValueError, match="certificate"):
        certificates_end(pem)
