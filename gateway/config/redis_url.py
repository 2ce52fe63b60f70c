"""Parses Redis URLs without the library: one server, sentinels, or a cluster.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB]              rediss:// with TLS, unix:///path/to/socket?db=0
    redis+sentinel://[...@]HOST[:PORT],HOST.../SERVICE[/DB]       rediss+sentinel://
    redis+cluster://[...@]HOST[:PORT],HOST...                     rediss+cluster://

Rules:
- No error message repeats a URL, which may hold a password. `RedisUrl.redacted` has none.
- Query options are listed: a misspelt option is refused here, not at the first request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import parse_qsl, unquote, urlsplit

OPTIONS = frozenset(
    "db client_name ssl_ca_certs ssl_ca_path ssl_certfile ssl_keyfile ssl_keyfile_password ssl_cert_reqs"
    " ssl_check_hostname sentinel_username sentinel_password".split()
)


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
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{scheme}://{hosts}/{self.service}" if self.service else f"{scheme}://{hosts}"


def parse_redis_url(text: str) -> RedisUrl:
    """Raises ValueError, which says how to correct the URL."""
    parts = urlsplit(text)
    try:
        kind = RedisTopology(parts.scheme.replace("rediss", "redis", 1))
    except ValueError:
        raise ValueError("not a Redis URL; write it like redis://127.0.0.1:6379/0") from None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - OPTIONS):
        raise ValueError(f"a Redis URL has no option '{unknown[0][:40]}'; known: {', '.join(sorted(OPTIONS))}")
    credentials, _, netloc = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    port = 26379 if kind is RedisTopology.SENTINEL else 6379
    hosts = [] if kind is RedisTopology.UNIX else _hosts(netloc, port)
    service, number = _service(kind, parts.path)
    db = options.pop("db", "") or number
    if kind is RedisTopology.CLUSTER and db not in ("", "0"):
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
