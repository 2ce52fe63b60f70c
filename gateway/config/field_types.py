"""Validated types of configuration values: addresses, URLs, names, digests, secrets.

Each type is an annotated value that pydantic validates. A message never repeats a value that may be a secret.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, PlainSerializer, PlainValidator, SecretStr, WithJsonSchema

from backends.catalog import KINDS
from backends.http.connection_pool import BackendAddress
from backends.simulated.profiles import PROFILES
from gateway.config.config_errors import did_you_mean
from gateway.config.redis_url import parse_redis_url
from policies.routes.route import Duration, Strict

_LISTEN = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:\[\]]+)):([0-9]{1,5})")
_TCP = r"tcp://[^/@\s]+:[0-9]{1,5}"
_POOL = r"[A-Za-z0-9][A-Za-z0-9._:-]*"
_HEADER_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # RFC 9110 section 5.6.2
_TRANSPORT_HEADER = r"(?i:host|content-length|transfer-encoding|connection)"
_DIGEST = r"[0-9a-fA-F]{64}"

TextOrSecret = TypeVar("TextOrSecret", str, SecretStr)


class Section(Strict):
    """Base of all sections. The string below a field is its description in the JSON Schema."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        model_title_generator=lambda model: model.__name__.removesuffix("Section"),
    )


def written(text: str) -> Any:
    """A default in the form of YAML text."""
    return Field(text, validate_default=True)


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


def _matching(pattern: str, message: str) -> AfterValidator:
    """`{value}` in the message is the value."""
    compiled = re.compile(pattern)

    def validate(value: TextOrSecret) -> TextOrSecret:
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        if not compiled.fullmatch(text):
            raise ValueError(message.format(value=text))
        return value

    return AfterValidator(validate)


def _one_of(noun: str, known: Collection[str]) -> AfterValidator:
    def validate(value: str) -> str:
        if value not in known:
            raise ValueError(f"no {noun} '{value}'{did_you_mean(value, known)}")
        return value

    return AfterValidator(validate)


def _redis(value: SecretStr) -> SecretStr:
    parse_redis_url(value.get_secret_value())  # the error does not repeat the URL, which may contain a password
    return value


def _text(pattern: str, **described: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, **described})


Positive = Annotated[Duration, Field(gt=0)]
Listen = Annotated[
    ListenAddress,
    PlainValidator(_listen),
    PlainSerializer(str),
    _text(r":[0-9]+$", description="host:port, such as 127.0.0.1:8080"),
]
HttpUrl = Annotated[
    str,
    AfterValidator(_http_url),
    _text(r"^https?://[^/?#@\s]+[^?#\s]*$", description="http://host:port, or https://"),
]
TcpUrl = Annotated[
    str,
    _matching(r"[^@]*", "a KV event URL must not contain credentials: ZMQ has none"),
    _matching(_TCP, "'{value}' is not a KV event URL; write it like tcp://10.0.0.12:5557"),
    _text(f"^{_TCP}$", description="tcp://host:port"),
]
PoolName = Annotated[str, _matching(_POOL, "a pool name may contain letters, digits and . _ : - only")]
Name = Annotated[str, _matching(r"[!-~]+", "a name is sent in a header: visible ASCII without spaces only")]
Namespace = Annotated[
    str,
    _matching(_POOL, "a namespace may contain letters, digits and . _ : - only: it is the prefix of every Redis key"),
]
Sha256 = Annotated[  # the value may be the key itself: not repeated
    str,
    _matching(_DIGEST, 'not a SHA-256 digest, 64 hex digits: printf %s "$KEY" | sha256sum'),
    AfterValidator(str.lower),
    _text(f"^{_DIGEST}$"),
]
HeaderName = Annotated[
    str,
    _matching(_HEADER_NAME, "not the name of a header"),
    _matching(f"(?!{_TRANSPORT_HEADER}$).*", "the connection sets this header itself; leave it out"),
    AfterValidator(str.lower),
]
HeaderValue = Annotated[SecretStr, _matching(r"[\t -~]*", "the value of a header is one line of visible ASCII")]
RedisSetting = Annotated[SecretStr, AfterValidator(_redis), _text(r"^(rediss?(\+sentinel|\+cluster)?|unix)://")]
CacheSecret = Annotated[
    SecretStr, _matching(r"(?s).{16,}", "a secret needs at least 16 characters: openssl rand -hex 32")
]
BackendName = Annotated[str, _one_of("backend", KINDS), WithJsonSchema({"type": "string", "enum": sorted(KINDS)})]
ProfileName = Annotated[str, _one_of("profile", PROFILES)]
AccessLog = Annotated[
    str,
    _matching(
        r"(?s)stdout|stderr|off|.*[/.].*", "'{value}' is not stdout, stderr, off or a path such as ./access.jsonl"
    ),
    _text(r"^(stdout|stderr|off|.*[/.].*)$"),
]
