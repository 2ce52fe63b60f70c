"""Validated types of configuration values: addresses, URLs, names, digests, secrets.

Each type is an annotated value that pydantic validates. A message never repeats a value that may be a secret.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    WithJsonSchema,
)

from backends.catalog import KINDS
from backends.http.connection_pool import BackendAddress
from backends.http.tunnel import ProxyAddress
from backends.server_profiles import PROFILES
from gateway.config.config_errors import did_you_mean
from policies.routes.route import Duration, Strict

_LISTEN = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:\[\]]+)):([0-9]{1,5})")
_TCP = r"tcp://[^/@\s]+:[0-9]{1,5}"
_POOL = r"[A-Za-z0-9][A-Za-z0-9._:-]*"
HEADER_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # RFC 9110 section 5.6.2
TRANSPORT_HEADER = r"(?i:host|content-length|transfer-encoding|connection)"
OWN_PARAMETER = r"model|stream|messages|prompt|input|cache_salt"
_DIGEST = r"[0-9a-fA-F]{64}"
REDIS_OPTIONS = frozenset(
    "db client_name ssl_ca_certs ssl_ca_path ssl_certfile ssl_keyfile ssl_keyfile_password ssl_cert_reqs"
    " ssl_check_hostname sentinel_username sentinel_password".split()
)


class Section(Strict):
    """Base of all sections. The string below a field is its description in the JSON Schema."""

    model_config = ConfigDict(
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


def listen_address(value: Any) -> ListenAddress:
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


class RedisTopology(Enum):
    SINGLE = "redis"
    UNIX = "unix"
    SENTINEL = "redis+sentinel"
    CLUSTER = "redis+cluster"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`hosts`: Redis itself, its sentinels, or some of the cluster's nodes; none with a `path`."""

    kind: RedisTopology
    hosts: Sequence[tuple[str, int]] = field(default_factory=list)
    tls: bool = False
    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    service: str = ""
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def redacted(self) -> str:
        """For logs: no password."""
        if self.kind is RedisTopology.UNIX:
            return f"unix://{self.path}"
        scheme = self.kind.value.replace("redis", "rediss") if self.tls else self.kind.value
        hosts = ",".join(str(ListenAddress(host, port)) for host, port in self.hosts)
        return f"{scheme}://{hosts}/{self.service}" if self.service else f"{scheme}://{hosts}"


def parse_redis_url(text: str) -> RedisUrl:
    """One server, sentinels, or a cluster, without the library. Raises ValueError with the correction, without the URL.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB]              rediss:// with TLS, unix:///path/to/socket?db=0
    redis+sentinel://[...@]HOST[:PORT],HOST.../SERVICE[/DB]       rediss+sentinel://
    redis+cluster://[...@]HOST[:PORT],HOST...                     rediss+cluster://

    Query options are listed: a misspelt option is refused here, not at the first request.
    """
    parts = urlsplit(text)
    try:
        kind = RedisTopology(parts.scheme.replace("rediss", "redis", 1))
    except ValueError:
        raise ValueError("not a Redis URL; write it like redis://127.0.0.1:6379/0") from None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - REDIS_OPTIONS):
        raise ValueError(f"a Redis URL has no option '{unknown[0][:40]}'; known: {', '.join(sorted(REDIS_OPTIONS))}")
    credentials, _, netloc = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    port = 26379 if kind is RedisTopology.SENTINEL else 6379
    hosts = [] if kind is RedisTopology.UNIX else _hosts(netloc, port)
    service, number = _service(kind, parts.path)
    option = options.pop("db", "")
    db = option or number
    if kind is RedisTopology.CLUSTER and (number or option) not in ("", "0"):
        raise ValueError("a Redis Cluster has database 0 alone; leave the number out")
    if kind is RedisTopology.SINGLE and len(hosts) > 1:
        raise ValueError(
            "several hosts are sentinels or a cluster: redis+sentinel://H,H/SERVICE or redis+cluster://H,H"
        )
    if db and not db.isdecimal():
        raise ValueError("the database of a Redis URL is a number: redis://127.0.0.1:6379/0")
    return RedisUrl(
        kind=kind,
        hosts=hosts,
        tls=parts.scheme.startswith("rediss"),
        username=unquote(user),
        password=unquote(password),
        db=int(db or 0),
        service=unquote(service),
        path=unquote(parts.path) if kind is RedisTopology.UNIX else "",
        options=options,
    )


def _service(kind: RedisTopology, path: str) -> tuple[str, str]:
    """The service of sentinels, and the number of the database."""
    if kind is not RedisTopology.SENTINEL:
        return "", "" if kind is RedisTopology.UNIX else path[1:]
    service, _, number = path.strip("/").rpartition("/")
    if not number.isdecimal():
        service, number = path.strip("/"), ""
    if not service:
        raise ValueError("a sentinel URL names the service: redis+sentinel://HOST,HOST/SERVICE/0")
    return service, number


def _hosts(text: str, port: int) -> list[tuple[str, int]]:
    try:
        parts = [urlsplit(f"//{host}") for host in text.split(",")]
        return [(part.hostname or "127.0.0.1", part.port or port) for part in parts]
    except ValueError:
        raise ValueError("a host of a Redis URL is HOST or HOST:PORT; an IPv6 address stands in [ ]") from None


def _matching(pattern: str, message: str) -> AfterValidator:
    """`{value}` in the message is the value."""
    compiled = re.compile(pattern)

    def validate(value: Any) -> Any:
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


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [value for value, times in Counter(values).items() if times > 1]:
        raise ValueError(f"'{twice[0]}' is there twice")
    return values


def _redis(value: SecretStr) -> SecretStr:
    parse_redis_url(value.get_secret_value())
    return value


def _proxy(value: SecretStr) -> SecretStr:
    ProxyAddress.parse(value.get_secret_value())
    return value


def _text(pattern: str, **described: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, **described})


Positive = Annotated[Duration, Field(gt=0)]
Listen = Annotated[
    ListenAddress,
    PlainValidator(listen_address),
    PlainSerializer(str),
    _text(r":[0-9]+$", description="host:port, such as 127.0.0.1:8080"),
]
HostName = Annotated[
    str,
    _matching(r"[A-Za-z0-9._-]+", "'{value}' is not a host name; write it like gateway.example.com, without a port"),
    AfterValidator(str.lower),
]
Origin = Annotated[
    str,
    AfterValidator(str.lower),
    _matching(
        r"\*|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?",
        "'{value}' is not an origin; write it like https://app.example.com, without a path",
    ),
    _matching(r"(?!http://.*:80$|https://.*:443$).*", "browsers leave the default port out of '{value}'; do so too"),
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
Names = Annotated[tuple[Name, ...], AfterValidator(_distinct)]
ModelName = Annotated[
    str,
    Name.__metadata__[0],
    _matching(r"\*|[^*]+", "'{value}' is no model: write its whole name, or '*' for every model"),
]
ModelNames = Annotated[
    tuple[ModelName, ...],
    BeforeValidator(lambda value: [value] if value == "*" else value),
    AfterValidator(_distinct),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"const": "*"}]}),
]
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
    _matching(HEADER_NAME, "not the name of a header"),
    _matching(f"(?!{TRANSPORT_HEADER}$).*", "the connection sets this header itself; leave it out"),
    AfterValidator(str.lower),
]
HeaderValue = Annotated[SecretStr, _matching(r"[\t -~]*", "the value of a header is one line of visible ASCII")]
QueryName = Annotated[str, _matching(r"[!-~]+", "a query parameter has a name of visible ASCII")]
ParameterName = Annotated[
    str,
    _matching(r"[!-~]+", "a parameter has a name of visible ASCII"),
    _matching(
        f"(?!(?:{OWN_PARAMETER})$).*", "'{value}' is the gateway's own to set: it is neither renamed nor dropped"
    ),
]
ProxyUrl = Annotated[SecretStr, AfterValidator(_proxy), _text(r"^http://[^/?#\s]+/?$")]
RedisSetting = Annotated[SecretStr, AfterValidator(_redis), _text(r"^(rediss?(\+sentinel|\+cluster)?|unix)://")]
OwnSecret = Annotated[
    SecretStr, _matching(r"(?s).{16,}", "a secret needs at least 16 characters: openssl rand -hex 32")
]
BackendName = Annotated[str, _one_of("backend", KINDS), WithJsonSchema({"type": "string", "enum": sorted(KINDS)})]
ProfileName = Annotated[str, _one_of("profile", PROFILES)]
Directory = Annotated[
    str, _matching(r"(?s).*[/.].*", "'{value}' is not a path such as ./state or /var/lib/firsttoken"), _text(r"[/.]")
]
AccessLog = Annotated[
    str,
    _matching(
        r"(?s)stdout|stderr|off|.*[/.].*", "'{value}' is not stdout, stderr, off or a path such as ./access.jsonl"
    ),
    _text(r"^(stdout|stderr|off|.*[/.].*)$"),
]
