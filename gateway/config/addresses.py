"""Addresses of the configuration: `host:port` and http(s) URLs, validated.

Each type is an annotated value that pydantic checks, so that the models read like the YAML.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, PlainSerializer, PlainValidator, WithJsonSchema

import backends.http.address

_LISTEN = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:\[\]]+)):([0-9]{1,5})")
_TCP = re.compile(r"tcp://[^/@\s]+:[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host and a port to listen on; port 0 takes any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def address(value: Any) -> ListenAddress:
    """`127.0.0.1:8080` or `[::1]:8080`."""
    if isinstance(value, ListenAddress):
        return value
    match = _LISTEN.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"'{value}' is not host:port; write it like 127.0.0.1:8080 or [::1]:8080")
    return ListenAddress(match[1] or match[2], int(match[3]))


def http_url(value: str) -> str:
    """A backend's base URL, without a closing slash."""
    backends.http.address.BackendAddress.parse(value)
    return value.rstrip("/")


def authority(url: str, at: str = "") -> str:
    """The `host:port` of a base URL, with an explicit port; `at`: with one of the host's addresses."""
    server = backends.http.address.BackendAddress.parse(url)
    return str(ListenAddress(at or server.host, server.port))


def host_of(url: str) -> str:
    return backends.http.address.BackendAddress.parse(url).host


def is_address(host: str) -> bool:
    """As opposed to a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def tcp_host(url: str) -> str:
    return url.removeprefix("tcp://").rpartition(":")[0]


def tcp_at(url: str, address: str) -> str:
    """The same port there."""
    return f"tcp://{ListenAddress(address, int(url.rpartition(':')[2]))}"


def tcp_url(value: str) -> str:
    """The address at which an engine publishes its events."""
    if "@" in value:
        raise ValueError("a URL of events holds credentials, which ZMQ knows nothing of")
    if not _TCP.fullmatch(value):
        raise ValueError(f"'{value}' is not where events come from; write it like tcp://10.0.0.12:5557")
    return value


def _text(description: str, pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "description": description})


Listen = Annotated[
    ListenAddress,
    PlainValidator(address),
    PlainSerializer(str),
    _text("host:port, such as 127.0.0.1:8080", r":[0-9]+$"),
]
HttpUrl = Annotated[
    str, AfterValidator(http_url), _text("http://host:port, or https://", r"^https?://[^/?#@\s]+[^?#\s]*$")
]
TcpUrl = Annotated[str, AfterValidator(tcp_url), _text("tcp://host:port", r"^tcp://[^/@\s]+:[0-9]{1,5}$")]
