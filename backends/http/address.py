"""Base URLs of backends.

One rule: **a URL with a path names the API, one without a path means `/v1`.** `http://10.0.0.11:8000` and
`http://10.0.0.11:8000/v1` are the same server; `https://api.groq.com/openai/v1` is complete, as for OpenAI's SDKs.
Calls use OpenAI's paths: `/v1/...` is the API; anything else (`/health`, `/metrics`) belongs to the server and is
looked up where `/v1` would be.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class BackendAddress:
    """A parsed base URL."""

    host: str
    port: int
    tls: bool
    authority: str  # for the Host header
    api: str  # path that replaces /v1
    root: str  # path prefix of the server's own pages

    @classmethod
    def parse(cls, url: str) -> BackendAddress:
        """Parse a base URL. Raises ValueError, with the correction in its message."""
        if "@" in url:
            raise ValueError("a backend's URL holds credentials; put the key into api_key")
        try:
            parts = urlsplit(url)
            default = _PORTS[parts.scheme]
            host, port = parts.hostname, parts.port or default
        except (ValueError, KeyError):
            host, port = None, 0
        if not host or any(character <= " " or character == "\x7f" for character in url):
            raise ValueError(f"{url!r} is not a server's URL; write it like http://10.0.0.11:8000")
        if parts.query or parts.fragment:
            raise ValueError("the URL has a query or a fragment; end it with the path of the API, like /v1")
        path = parts.path.rstrip("/") or "/v1"
        return cls(host, port, parts.scheme == "https", parts.netloc, path, path.removesuffix("/v1"))

    def target(self, path: str) -> str:
        """Request target for the path of a call."""
        return self.api + path[3:] if path.startswith("/v1/") else self.root + path
