from hypothesis import given
from hypothesis import strategies as st

from lab.engines.kv_cache import PrefixCache


def held(cache: PrefixCache, chain: list[str]) -> None:
    """Let a request compute `chain` and end."""
    assert cache.acquire(chain, 0, len(chain))
    cache.commit(chain)
    cache.release(chain, 0)


def test_a_released_prefix_can_be_hit():
    """Computed blocks stay cached when the request ends, and stay free to be allocated."""
    cache = PrefixCache(4)
    held(cache, ["a", "b"])
    assert (cache.match(["a", "b", "c"], 3), cache.free) == (2, 4)


def test_a_match_ends_at_the_first_gap():
    """A block is worth nothing without all blocks before it."""
    cache = PrefixCache(4)
    held(cache, ["a", "b", "c"])
    assert (cache.match(["a", "x", "c"], 3), cache.match(["a", "b", "c"], 2)) == (1, 2)


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    """Blocks are freed in reverse, so that a shortened prefix is still a prefix."""
    cache = PrefixCache(3)
    held(cache, ["a", "b", "c"])
    cache.allocate(1)
    assert cache.match(["a", "b", "c"], 3) == 2


def test_the_least_recently_used_prefix_is_evicted_first():
    """A hit makes a prefix young again."""
    cache = PrefixCache(4)
    held(cache, ["old"])
    held(cache, ["new"])
    cache.acquire(["old"], 1, 1)
    cache.release(["old"], 0)
    cache.allocate(3)
    assert (cache.match(["old"], 1), cache.match(["new"], 1)) == (1, 0)


def test_blocks_without_content_are_taken_before_cached_ones():
    """Nothing is forgotten while empty blocks are left."""
    cache = PrefixCache(4)
    held(cache, ["a", "b"])
    cache.allocate(2)
    assert cache.match(["a", "b"], 2) == 2


def test_a_block_in_use_is_never_evicted():
    """An allocation without enough free blocks fails, and changes nothing."""
    cache = PrefixCache(3)
    held(cache, ["a", "b"])
    cache.acquire(["a"], 1, 1)
    assert (cache.acquire(["x"], 0, 3), cache.free, cache.match(["a", "b"], 2)) == (False, 2, 2)


def test_a_hit_on_idle_blocks_takes_them_out_of_the_free_ones():
    """Two idle blocks which are hit cannot also serve as new blocks."""
    cache = PrefixCache(3)
    held(cache, ["a", "b"])
    assert (cache.acquire(["a", "b"], 2, 4), cache.acquire(["a", "b"], 2, 3)) == (False, True)


def test_a_shared_block_is_free_when_the_last_request_ends():
    """Blocks are counted by reference."""
    cache = PrefixCache(2)
    held(cache, ["a"])
    cache.acquire(["a"], 1, 1)
    cache.acquire(["a"], 1, 1)
    cache.release(["a"], 0)
    one_left = cache.free
    cache.release(["a"], 0)
    assert (one_left, cache.free) == (1, 2)


def test_two_requests_that_computed_the_same_block_share_one():
    """The second copy becomes spare as soon as it is complete."""
    cache = PrefixCache(2)
    for _ in range(2):
        assert cache.acquire([], 0, 1)
    cache.commit(["a"])
    cache.commit(["a"])
    assert (cache.free, cache.match(["a"], 1)) == (1, 1)


requests = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 3), st.booleans()), max_size=40)


@given(requests)
def test_blocks_are_neither_lost_nor_made(requests: list[tuple[int, int, int, bool]]):
    """After any sequence of requests, all blocks not held are free, and at the end all are."""
    cache, running = PrefixCache(12), []
    for name, length, private, ends in requests:
        chain = [f"{name}/{i}" for i in range(length)]
        hit = cache.match(chain, length - 1)
        if cache.acquire(chain, hit, length + private):
            cache.commit(chain[hit:])
            running.append((chain, private))
        if ends and running:
            cache.release(*running.pop(0))
        distinct = {block for chain, _ in running for block in chain}
        assert cache.capacity - cache.free == len(distinct) + sum(private for _, private in running)
    for chain, private in running:
        cache.release(chain, private)
    assert cache.free == cache.capacity


def test_an_evicted_block_can_be_loaded_from_the_host_until_that_is_full():
    """The end of a prefix is dropped before its start; and without a host nothing is kept."""
    for host, loadable in ((0, 0), (2, 2), (1, 1)):
        cache = PrefixCache(2, host)
        held(cache, ["a", "b"])
        held(cache, ["x", "y"])
        assert (cache.match(["a", "b"], 2), cache.loadable(["a", "b"], 0, 2)) == (0, loadable)


def test_what_happens_to_blocks_is_told_to_a_listener():
    """The copy in the host comes before the removal from the GPU: a block is never nowhere between the two."""
    cache = PrefixCache(1, 1)
    cache.changes = []
    held(cache, ["a"])
    held(cache, ["b"])
    held(cache, ["c"])
    assert [(change.medium, change.stored, *change.blocks) for change in cache.changes] == [
        ("gpu", True, "a"),
        ("cpu", True, "a"),
        ("gpu", False, "a"),
        ("gpu", True, "b"),
        ("cpu", True, "b"),
        ("cpu", False, "a"),
        ("gpu", False, "b"),
        ("gpu", True, "c"),
    ]
