"""Stores that come back with another history than gateways have seen: a failover to a replica that lags, a restore."""

from __future__ import annotations

import pytest

from tests.gateway.admission.test_key_store import HASH, SEEN, key, stored_by, watching
from tests.support.redis import redis_server
from tests.support.simulated import eventually


@pytest.mark.parametrize("made_since", [1, 2])
async def test_keys_made_after_a_failover_are_known_and_revoked_ones_are_not(made_since: int) -> None:
    """The replica had not heard of a revocation. Before the gateway looks, its count of changes is as high as that of
    the lost store, or higher: the number alone tells nothing. The store is told what it does not know, for gateways
    that start later."""
    async with redis_server() as server, watching(server) as (link, changes):
        store = stored_by(link)
        for name in ("a", "b"):
            await store.add(key(name))
        await eventually(lambda: changes and changes[-1] == ["a", "b"], SEEN)
        lagging = await link.call(lambda redis: redis.dump(HASH))
        await store.revoke("b")
        await eventually(lambda: changes[-1] == ["a"], SEEN)

        await link.call(lambda redis: redis.restore(HASH, 0, lagging, replace=True))
        for number in range(made_since):
            await store.add(key(f"new{number}"))
        await eventually(lambda: changes[-1] == ["a", *(f"new{number}" for number in range(made_since))], SEEN)
        digest = key("b").sha256
        async with watching(server) as (_, of_another):
            await eventually(lambda: of_another and "b" not in of_another[-1], SEEN)
        assert digest in (await store.read()).refused
