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
PORT, SENTINEL_PORT = 6379, 26379


class RedisTopology(Enum):
    SINGLE = "redis"
    UNIX = "unix"
    SENTINEL = "redis+sentinel"
    CLUSTER = "redis+cluster"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`hosts`: Redis itself, its sentinels, or some of the cluster's nodes; none with a `path`."""

    kind: RedisTopology
    hosts: Sequence[tuple[str, int]] = ()
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
    kind, tls = _kind(parts.scheme)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - OPTIONS):
        raise ValueError(f"a Redis URL has no option '{unknown[0][:40]}'; known: {', '.join(sorted(OPTIONS))}")
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    db = options.pop("db", "")
    service, number = "", parts.path[1:]
    hosts: Sequence[tuple[str, int]] = ()
    if kind is RedisTopology.UNIX:
        number = ""
    else:
        port = SENTINEL_PORT if kind is RedisTopology.SENTINEL else PORT
        hosts = _hosts(parts.netloc.rpartition("@")[2], port)
    if kind is RedisTopology.SENTINEL:
        service, _, number = parts.path.strip("/").rpartition("/")
        if not number.isdecimal():
            service, number = parts.path.strip("/"), ""
        if not service:
            raise ValueError("a sentinel URL names the service: redis+sentinel://HOST,HOST/SERVICE/0")
    if kind is RedisTopology.CLUSTER and (number or db) not in ("", "0"):
        raise ValueError("a Redis Cluster has database 0 alone; leave the number out")
    if kind is RedisTopology.SINGLE and len(hosts) > 1:
        raise ValueError(
            "several hosts are sentinels or a cluster: redis+sentinel://H,H/SERVICE or redis+cluster://H,H"
        )
    return RedisUrl(
        kind=kind,
        hosts=hosts,
        tls=tls,
        username=unquote(user),
        password=unquote(password),
        db=_db(db or number),
        service=unquote(service),
        path=unquote(parts.path) if kind is RedisTopology.UNIX else "",
        options=options,
    )


def _kind(scheme: str) -> tuple[RedisTopology, bool]:
    tls = scheme.startswith("rediss")
    try:
        return RedisTopology(scheme.replace("rediss", "redis", 1) if tls else scheme), tls
    except ValueError:
        raise ValueError("not a Redis URL; write it like redis://127.0.0.1:6379/0") from None


def _db(text: str) -> int:
    if text and not text.isdecimal():
        raise ValueError("the database of a Redis URL is a number: redis://127.0.0.1:6379/0")
    return int(text or 0)


def _hosts(text: str, port: int) -> list[tuple[str, int]]:
    hosts = []
    for one in text.split(","):
        try:
            split = urlsplit(f"//{one}")
            hosts.append((split.hostname or "127.0.0.1", split.port or port))
        except ValueError:
            raise ValueError("a host of a Redis URL is HOST or HOST:PORT; an IPv6 address stands in [ ]") from None
    return hosts
