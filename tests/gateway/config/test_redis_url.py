"""Every spelling of a Redis URL is read, what cannot be meant is refused, and a password is nowhere shown."""

from __future__ import annotations

import pytest

from gateway.config.field_types import RedisTopology, RedisUrl, parse_redis_url


@pytest.mark.parametrize(
    ("url", "address", "shown"),
    [
        ("redis://", RedisUrl(RedisTopology.SINGLE, [("127.0.0.1", 6379)]), "redis://127.0.0.1:6379"),
        ("redis://h:1/2", RedisUrl(RedisTopology.SINGLE, [("h", 1)], db=2), "redis://h:1"),
        ("redis://h?db=3", RedisUrl(RedisTopology.SINGLE, [("h", 6379)], db=3), "redis://h:6379"),
        (
            "rediss://u:p%40ss@[::1]:7/0?ssl_ca_certs=/ca.pem",
            RedisUrl(RedisTopology.SINGLE, [("::1", 7)], True, "u", "p@ss", options={"ssl_ca_certs": "/ca.pem"}),
            "rediss://[::1]:7",
        ),
        ("unix:///run/r.sock?db=1", RedisUrl(RedisTopology.UNIX, db=1, path="/run/r.sock"), "unix:///run/r.sock"),
        (
            "redis+sentinel://:p@a,b:1/main/4",
            RedisUrl(RedisTopology.SENTINEL, [("a", 26379), ("b", 1)], password="p", db=4, service="main"),
            "redis+sentinel://a:26379,b:1/main",
        ),
        (
            "rediss+sentinel://a/main",
            RedisUrl(RedisTopology.SENTINEL, [("a", 26379)], True, service="main"),
            "rediss+sentinel://a:26379/main",
        ),
        (
            "redis+cluster://a:1,b:2",
            RedisUrl(RedisTopology.CLUSTER, [("a", 1), ("b", 2)]),
            "redis+cluster://a:1,b:2",
        ),
    ],
)
def test_a_url_is_read(url: str, address: RedisUrl, shown: str) -> None:
    assert parse_redis_url(url) == address
    assert parse_redis_url(url).redacted == shown


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h", "not a Redis URL"),
        ("redis+sentinel://a,b", "names the service"),
        ("redis://a,b", "several hosts"),
        ("redis+cluster://a/1", "database 0 alone"),
        ("redis+cluster://a/1?db=0", "database 0 alone"),
        ("redis://h/x", "is a number"),
        ("redis://h:port", "HOST:PORT"),
        ("redis://h?socket_timeout=9", "no option 'socket_timeout'"),
    ],
)
def test_an_invalid_redis_url_is_refused_without_quoting_the_url(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        parse_redis_url(url.replace("://", "://:CANARY@", 1))
    assert "CANARY" not in str(refused.value)


def test_no_text_of_an_address_holds_its_password() -> None:
    address = parse_redis_url("redis+sentinel://u:CANARY@a/main?sentinel_password=CANARY")
    assert "CANARY" not in f"{address!r} {address.redacted}"
