"""The bounded map."""

from __future__ import annotations

from gateway.tokenize.lru import Lru


def test_the_least_recently_used_goes_first() -> None:
    """Using a value saves it."""
    cache: Lru[bytes] = Lru(limit=30, size=len)
    for key in (1, 2, 3):
        cache.put(key, b"0123456789")
    cache.get(1)
    cache.put(4, b"0123456789")
    assert [key for key in (1, 2, 3, 4) if cache.get(key) is not None] == [1, 3, 4]


def test_bytes_are_those_of_the_values_held() -> None:
    """Replacing and dropping values is accounted for."""
    cache: Lru[bytes] = Lru(limit=30, size=len)
    cache.put(1, b"0123456789")
    cache.put(1, b"01234")
    cache.put(2, b"0" * 20)
    assert (len(cache), cache.bytes) == (2, 25)
    cache.put(3, b"0" * 6)
    assert (len(cache), cache.bytes) == (2, 26)


def test_a_value_larger_than_the_map_is_not_kept() -> None:
    """The bound holds whatever is put in."""
    cache: Lru[bytes] = Lru(limit=30, size=len)
    cache.put(1, b"0" * 31)
    assert (len(cache), cache.bytes) == (0, 0)


def test_to_peek_is_not_to_use() -> None:
    """Other threads may look without changing what goes first."""
    cache: Lru[bytes] = Lru(limit=20, size=len)
    cache.put_all([(1, b"0123456789"), (2, b"0123456789")])
    assert (cache.peek(1), cache.peek(3)) == (b"0123456789", None)
    cache.put(3, b"0123456789")
    assert cache.peek(1) is None
