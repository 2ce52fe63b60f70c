"""Validated types of configuration values: addresses, URLs, names, digests, secrets.

Each type is an annotated value that pydantic validates. A message never repeats a value that may be a secret.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, PlainSerializer, PlainValidator, SecretStr, WithJsonSchema

from backends.http.connection_pool import BackendAddress
from backends.simulated.profiles import PROFILES
from gateway.config.config_errors import did_you_mean
from gateway.config.redis_url import parse_redis_url
from policies.routes.route import Duration, Strict

_LISTEN = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:\[\]]+)):([0-9]{1,5})")
_TCP = re.compile(r"tcp://[^/@\s]+:[0-9]{1,5}")
_POOL = r"[A-Za-z0-9][A-Za-z0-9._:-]*"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 section 5.6.2
_HEADER_VALUE = re.compile(r"[\t -~]*")
_TRANSPORT_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})
_MIN_SECRET = 16  # characters


def _title(model: type) -> str:
    return model.__name__.removesuffix("Section")


class Section(Strict):
    """Base of all sections. The string below a field is its description in the JSON Schema."""

    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False, model_title_generator=_title)


def written(text: str) -> Any:
    """A default in the form in which YAML gives it."""
    return Field(text, validate_default=True)


# ---------------------------------------------------------------- addresses


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host and a port to listen on; port 0 takes any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Reachable from this machine only."""
        return ipaddress.ip_address(self.host).is_loopback if is_ip(self.host) else self.host == "localhost"


def _listen(value: Any) -> ListenAddress:
    if isinstance(value, ListenAddress):
        return value
    match = _LISTEN.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"'{value}' is not host:port; write it like 127.0.0.1:8080 or [::1]:8080")
    return ListenAddress(match[1] or match[2], int(match[3]))


def _http_url(value: str) -> str:
    BackendAddress.parse(value)
    return value.rstrip("/")


def _tcp_url(value: str) -> str:
    if "@" in value:
        raise ValueError("a KV event URL must not contain credentials: ZMQ has none")
    if not _TCP.fullmatch(value):
        raise ValueError(f"'{value}' is not a KV event URL; write it like tcp://10.0.0.12:5557")
    return value


def authority(url: str, ip: str = "") -> str:
    """`host:port` of a base URL, the port always included. `ip`: replaces the host."""
    server = BackendAddress.parse(url)
    return str(ListenAddress(ip or server.host, server.port))


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def tcp_host(url: str) -> str:
    return url.removeprefix("tcp://").rpartition(":")[0]


def tcp_with_host(url: str, host: str) -> str:
    """The same port on another host."""
    return f"tcp://{ListenAddress(host, int(url.rpartition(':')[2]))}"


# ---------------------------------------------------------------- names and secrets


def _matching(pattern: str, message: str) -> AfterValidator:
    compiled = re.compile(pattern)

    def validate(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(message)
        return value

    return AfterValidator(validate)


def _digest(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", value.lower()):  # the value may be the key itself: not repeated
        raise ValueError('not a SHA-256 digest, 64 hex digits: printf %s "$KEY" | sha256sum')
    return value.lower()


def _header_name(value: str) -> str:
    if not _HEADER_NAME.fullmatch(value):
        raise ValueError("not the name of a header")
    if value.lower() in _TRANSPORT_HEADERS:
        raise ValueError("the connection sets this header itself; leave it out")
    return value.lower()


def _header_value(value: SecretStr) -> SecretStr:
    if not _HEADER_VALUE.fullmatch(value.get_secret_value()):
        raise ValueError("the value of a header is one line of visible ASCII")
    return value


def _redis(value: SecretStr) -> SecretStr:
    parse_redis_url(value.get_secret_value())  # the error does not repeat the URL, which may contain a password
    return value


def _cache_secret(value: SecretStr) -> SecretStr:
    if len(value.get_secret_value()) < _MIN_SECRET:
        raise ValueError(f"a secret needs at least {_MIN_SECRET} characters: openssl rand -hex 32")
    return value


def _access_log(value: str) -> str:
    if value not in ("stdout", "stderr", "off") and not re.search(r"[/.]", value):
        raise ValueError(f"'{value}' is not stdout, stderr, off or a path such as ./access.jsonl")
    return value


def _profile(value: str | None) -> str | None:
    if value is not None and value not in PROFILES:
        raise ValueError(f"no profile '{value}'{did_you_mean(value, PROFILES)}")
    return value


def _text(pattern: str, description: str | None = None) -> WithJsonSchema:
    described = {} if description is None else {"description": description}
    return WithJsonSchema({"type": "string", "pattern": pattern, **described})


Listen = Annotated[
    ListenAddress,
    PlainValidator(_listen),
    PlainSerializer(str),
    _text(r":[0-9]+$", "host:port, such as 127.0.0.1:8080"),
]
HttpUrl = Annotated[
    str, AfterValidator(_http_url), _text(r"^https?://[^/?#@\s]+[^?#\s]*$", "http://host:port, or https://")
]
TcpUrl = Annotated[str, AfterValidator(_tcp_url), _text(r"^tcp://[^/@\s]+:[0-9]{1,5}$", "tcp://host:port")]
Positive = Annotated[Duration, Field(gt=0)]
PoolName = Annotated[str, _matching(_POOL, "a pool name may contain letters, digits and . _ : - only")]
Name = Annotated[str, _matching(r"[!-~]+", "a name is sent in a header: visible ASCII without spaces only")]
Namespace = Annotated[
    str,
    _matching(_POOL, "a namespace may contain letters, digits and . _ : - only: it is the prefix of every Redis key"),
]
Sha256 = Annotated[str, AfterValidator(_digest), _text(r"^[0-9a-fA-F]{64}$")]
HeaderName = Annotated[str, AfterValidator(_header_name)]
HeaderValue = Annotated[SecretStr, AfterValidator(_header_value)]
RedisUrl = Annotated[SecretStr, AfterValidator(_redis), _text(r"^(rediss?(\+sentinel|\+cluster)?|unix)://")]
CacheSecret = Annotated[SecretStr, AfterValidator(_cache_secret)]
ProfileName = Annotated[str | None, AfterValidator(_profile)]
AccessLog = Annotated[str, AfterValidator(_access_log), _text(r"^(stdout|stderr|off|.*[/.].*)$")]
