"""The URL of a Redis, read without the library: one server, sentinels that know it, or a cluster.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB]              rediss:// with TLS, unix:///path/to/socket?db=0
    redis+sentinel://[...@]HOST[:PORT],HOST.../SERVICE[/DB]       rediss+sentinel://
    redis+cluster://[...@]HOST[:PORT],HOST...                     rediss+cluster://

Rules:
- Nothing that is said of a URL repeats it: it may hold a password. `Address.shown` has none.
- What the query may say is listed: a misspelt option is refused here, not at the first request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

OPTIONS = frozenset(
    {
        "db",
        "client_name",
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_keyfile_password",
        "ssl_cert_reqs",
        "ssl_check_hostname",
        "sentinel_username",
        "sentinel_password",
    }
)
PORT, SENTINEL_PORT = 6379, 26379


class RedisTopology(Enum):
    SINGLE = "redis"
    UNIX = "unix"
    SENTINEL = "redis+sentinel"
    CLUSTER = "redis+cluster"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`hosts`: of Redis itself, of its sentinels, or where to ask for the cluster's nodes; of none with a `path`."""

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
    def shown(self) -> str:
        """For logs."""
        if self.kind is RedisTopology.UNIX:
            return f"unix://{self.path}"
        scheme = self.kind.value.replace("redis", "rediss") if self.tls else self.kind.value
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{scheme}://{hosts}/{self.service}" if self.service else f"{scheme}://{hosts}"


def parsed(url: str) -> RedisUrl:
    """Raises ValueError, with the mend."""
    parts = urlsplit(url)
    kind, tls = _kind(parts.scheme)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - OPTIONS):
        raise ValueError(f"a Redis URL has no option '{unknown[0][:40]}'; known: {', '.join(sorted(OPTIONS))}")
    db = options.pop("db", "")
    if kind is RedisTopology.UNIX:
        return RedisUrl(kind, (), False, *_who(parts), _db(db), "", unquote(parts.path), options)
    service, _, number = (
        parts.path.strip("/").rpartition("/") if kind is RedisTopology.SENTINEL else ("", "", parts.path[1:])
    )
    if kind is RedisTopology.SENTINEL and not number.isdecimal():
        service, number = parts.path.strip("/"), ""
    if kind is RedisTopology.SENTINEL and not service:
        raise ValueError("a sentinel URL names the service: redis+sentinel://HOST,HOST/SERVICE/0")
    if kind is RedisTopology.CLUSTER and (number or db) not in ("", "0"):
        raise ValueError("a Redis Cluster has database 0 alone; leave the number out")
    hosts = _hosts(parts.netloc.rpartition("@")[2], SENTINEL_PORT if kind is RedisTopology.SENTINEL else PORT)
    if kind is RedisTopology.SINGLE and len(hosts) > 1:
        raise ValueError(
            "several hosts are sentinels or a cluster: redis+sentinel://H,H/SERVICE or redis+cluster://H,H"
        )
    return RedisUrl(kind, hosts, tls, *_who(parts), _db(db or number), unquote(service), "", options)


def _kind(scheme: str) -> tuple[RedisTopology, bool]:
    tls = scheme.startswith("rediss")
    try:
        return RedisTopology(scheme.replace("rediss", "redis", 1) if tls else scheme), tls
    except ValueError:
        raise ValueError("not a Redis URL; write it like redis://127.0.0.1:6379/0") from None


def _who(parts: SplitResult) -> tuple[str, str]:
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    return unquote(user), unquote(password)


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
