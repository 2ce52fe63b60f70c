"""Values that follow from a configuration, and what two Runtimes have in common."""

from __future__ import annotations

from gateway.config.models import Config
from gateway.runtime import build_runtime
from policies.types import Price
from tests.support.gateways import document, pool

PRICE = {"input": 1.0, "output": 2.0}


def test_the_price_is_that_of_the_pool_that_answered() -> None:
    """Not that of the first choice."""
    pools = {"small": pool("http://127.0.0.1:9", price=PRICE), "large": pool("http://127.0.0.1:9")}
    runtime = build_runtime(Config.model_validate(document(pools)))
    assert runtime.pools["small"].price == Price(1.0, 2.0)
    assert runtime.pools["large"].price == Price()


def test_what_has_not_changed_is_the_same_object_in_the_next_runtime() -> None:
    """Connections and backends outlive a reload; what is new or gone is not shared."""
    both = {"a": pool("http://127.0.0.1:1"), "b": pool("http://127.0.0.1:2")}
    before = build_runtime(Config.model_validate(document(both)))
    changed = {"a": pool("http://127.0.0.1:1", price=PRICE), "b": pool("http://127.0.0.1:3")}
    after = build_runtime(Config.model_validate(document(changed)), before)
    old, new = list(before.upstreams.values()), list(after.upstreams.values())
    assert (new[0].connections is old[0].connections, new[1].connections is old[1].connections) == (True, False)
    assert [after.backends[name] is before.backends[name] for name in ("a", "b")] == [True, True]
