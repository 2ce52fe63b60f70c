"""The bounded map drops entries not used lately."""

from __future__ import annotations

from gateway.caches import GenerationalCache


def test_stored_values_are_found() -> None:
    """Empty values too; unknown keys are None."""
    cache: GenerationalCache[str] = GenerationalCache(4)
    cache.put(1, "one")
    cache.put(3, "")
    assert (cache.get(1), cache.get(2), cache.get(3)) == ("one", None, "")
    assert cache.get_all([3, 2, 1]) == ["", None, "one"]


def test_the_number_of_entries_is_bounded() -> None:
    """A full young generation replaces the old one."""
    cache: GenerationalCache[int] = GenerationalCache(20)
    for key in range(1_000):
        cache.put(key, key)
        assert len(cache) <= 20
    assert [cache.get(key) for key in (979, 980, 999)] == [None, 980, 999]


def test_a_used_entry_is_kept() -> None:
    """A hit moves an entry to the young generation."""
    cache: GenerationalCache[str] = GenerationalCache(8)
    cache.put(0, "kept")
    for key in range(1, 100):
        cache.put(key, "passing")
        assert cache.get_all([key, 0]) == ["passing", "kept"]


def test_an_entry_not_used_lately_goes_first() -> None:
    """A use saves an entry."""
    cache: GenerationalCache[bytes] = GenerationalCache(40, size=len)
    for key in (1, 2, 3):
        cache.put(key, b"0123456789")
    cache.get(1)
    cache.put(4, b"0123456789")
    assert [key for key in (1, 2, 3, 4) if cache.get(key) is not None] == [1, 3, 4]


def test_the_size_is_the_sum_of_the_values_held() -> None:
    """Replaced and dropped values are subtracted, moved values count once."""
    cache: GenerationalCache[bytes] = GenerationalCache(60, size=len)
    cache.put(1, b"0123456789")
    cache.put(1, b"01234")
    cache.put(2, b"0" * 20)
    assert (len(cache), cache.size) == (2, 25)
    cache.put(3, b"0" * 26)
    assert (len(cache), cache.size) == (3, 51)
    assert cache.get(2) == b"0" * 20
    assert (len(cache), cache.size) == (2, 46)


def test_a_value_larger_than_a_generation_is_not_kept() -> None:
    """The bound holds for values of any size."""
    cache: GenerationalCache[bytes] = GenerationalCache(60, size=len)
    cache.put(1, b"0" * 31)
    assert (len(cache), cache.size) == (0, 0)
