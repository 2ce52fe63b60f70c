"""Base URLs."""

from __future__ import annotations

import pytest

from backends.http.connection_pool import BackendAddress


@pytest.mark.parametrize(
    ("url", "path", "target"),
    [
        ("http://10.0.0.11:8000", "/v1/chat/completions", "/v1/chat/completions"),
        ("http://10.0.0.11:8000/", "/v1/chat/completions", "/v1/chat/completions"),
        ("http://10.0.0.11:8000/v1", "/v1/chat/completions", "/v1/chat/completions"),
        ("http://10.0.0.11:8000/v1/", "/v1/completions", "/v1/completions"),
        ("https://api.groq.com/openai/v1", "/v1/chat/completions", "/openai/v1/chat/completions"),
        (
            "https://generativelanguage.googleapis.com/v1beta/openai",
            "/v1/chat/completions",
            "/v1beta/openai/chat/completions",
        ),
        ("http://10.0.0.11:8000", "/health", "/health"),
        ("http://10.0.0.11:8000/v1", "/metrics", "/metrics"),
        ("http://proxy/team-a/v1", "/health", "/team-a/health"),
        ("http://proxy/team-a", "/health", "/team-a/health"),
    ],
)
def test_a_path_in_the_url_replaces_v1(url: str, path: str, target: str) -> None:
    """`/v1/...` is requested below the URL's path; other pages of the server are beside the API."""
    assert BackendAddress.parse(url).target(path) == target


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "authority"),
    [
        ("http://10.0.0.11", "10.0.0.11", 80, False, "10.0.0.11"),
        ("https://api.openai.com/v1", "api.openai.com", 443, True, "api.openai.com"),
        ("http://[::1]:8000", "::1", 8000, False, "[::1]:8000"),
    ],
)
def test_ports_have_defaults_and_the_host_header_is_as_configured(
    url: str, host: str, port: int, tls: bool, authority: str
) -> None:
    """80 and 443; an IPv6 address has no brackets in the socket address."""
    address = BackendAddress.parse(url)
    assert (address.host, address.port, address.tls, address.authority) == (host, port, tls, authority)


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("10.0.0.11:8000", "write it like http://10.0.0.11:8000"),
        ("ftp://10.0.0.11", "write it like http://10.0.0.11:8000"),
        ("http://", "write it like http://10.0.0.11:8000"),
        ("https://sk-secret@api.openai.com", "put the key into api_key"),
        ("https://api.openai.com/v1?key=1", "has a query or a fragment"),
        ("ftp://10.0.0.11:21", "write it like http://10.0.0.11:8000"),
        ("http://10.0.0.11:80000", "write it like http://10.0.0.11:8000"),
        ("http://10.0.0.11/a b", "write it like http://10.0.0.11:8000"),
    ],
)
def test_an_invalid_url_is_refused_with_a_correction(url: str, part: str) -> None:
    """At the start, not at the first request."""
    with pytest.raises(ValueError, match=part):
        BackendAddress.parse(url)


def test_a_refused_url_does_not_repeat_its_credentials() -> None:
    """Error messages end in logs."""
    with pytest.raises(ValueError) as refused:
        BackendAddress.parse("https://sk-secret@api.openai.com")
    assert "sk-secret" not in str(refused.value)
