"""Requests to the Kubernetes API server, as a pod makes them.

Rules:
- In a pod the address comes from the environment, token and certificates from the mounted service account. Kubernetes
  rotates both: the token is read for every request, the certificates when their file has changed.
- Every reply is bounded in size and in time.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from gateway.config.endpoint_section import KubernetesSection
from gateway.config.field_types import ListenAddress

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT = 10.0  # s
SILENCE = 30.0  # s without a byte of a list; a watch states its own time
MAX_OBJECT = 16 << 20  # bytes of one event or of one page of a list

Params = Mapping[str, str]


class ApiServerError(Exception):
    """The API server cannot be reached, or refuses. `status`: of HTTP; 0: no reply."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class SilentWatch(ApiServerError):
    """No byte, and no end, of a watch in its time."""


class ApiServer:
    """One session with the API server."""

    def __init__(self, settings: KubernetesSection) -> None:
        self._url = settings.api or _in_cluster()
        self.host = urlsplit(self._url).hostname or ""
        self._token = settings.token_file or (SERVICE_ACCOUNT / "token" if settings.api is None else None)
        self._ca = settings.ca or (SERVICE_ACCOUNT / "ca.crt" if settings.api is None else None)
        self._ssl: tuple[float, ssl.SSLContext] | None = None  # with the time of the file
        self._session = aiohttp.ClientSession(trust_env=False)

    async def close(self) -> None:
        await self._session.close()

    async def read(self, path: str, params: Params) -> bytes:
        """The whole reply. Raises ApiServerError."""
        async with self._get(path, params, SILENCE) as response:
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > MAX_OBJECT:
                    raise ApiServerError(f"a reply is longer than {MAX_OBJECT} bytes")
            return bytes(body)

    async def lines(self, path: str, params: Params, silence: float) -> AsyncGenerator[bytes]:
        """The lines of a watch, up to its end; a watch that breaks off has ended. Raises ApiServerError, also for one
        without a byte in `silence` seconds: the connection is half open, and nobody is behind it."""
        async with self._get(path, params, silence) as response:
            rest = bytearray()
            while part := await _read(response):
                rest += part
                while (end := rest.find(b"\n")) >= 0:
                    yield bytes(rest[:end])
                    del rest[: end + 1]
                if len(rest) > MAX_OBJECT:
                    raise ApiServerError(f"an event is longer than {MAX_OBJECT} bytes")

    @asynccontextmanager
    async def _get(self, path: str, params: Params, silence: float) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=silence)
        try:
            async with self._session.get(
                f"{self._url}{path}",
                params=params,
                headers=self._headers(),
                ssl=self._context(),
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise ApiServerError(f"{response.status} {response.reason}", response.status)
                yield response
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiServerError(str(error) or type(error).__name__) from None

    def _headers(self) -> dict[str, str]:
        if self._token is None:
            return {}
        return {"authorization": f"Bearer {self._token.read_text('ascii').strip()}"}

    def _context(self) -> ssl.SSLContext | bool:
        if self._ca is None:
            return True
        changed = self._ca.stat().st_mtime
        if self._ssl is None or self._ssl[0] != changed:
            self._ssl = changed, ssl.create_default_context(cafile=str(self._ca))
        return self._ssl[1]


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The next bytes of a watch; none at its end, or where it is lost. Raises ApiServerError after silence."""
    try:
        return await response.content.readany()
    except TimeoutError:
        raise SilentWatch("the watch is silent beyond its time") from None
    except (aiohttp.ClientError, OSError):
        return b""


def _in_cluster() -> str:
    """Raises ApiServerError outside of a cluster."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ApiServerError("not in a cluster: set kubernetes.api, such as http://localhost:8001 of `kubectl proxy`")
    return f"https://{ListenAddress(host, int(port))}"
