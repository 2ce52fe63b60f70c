"""The store of callers' keys that the configuration names, for an operator's rare question."""

from __future__ import annotations

from gateway.admission import key_store
from gateway.admission.key_file import FileKeys
from gateway.admission.key_store import KeyStore
from gateway.admission.redis_keys import RedisKeys, one_connection
from gateway.config.field_types import parse_redis_url
from gateway.config.models import StateSection


def operator_store(state: StateSection) -> KeyStore:
    """The store that `state.keys` names. A question may take PATIENCE."""
    if state.keys == "dir":
        assert state.dir is not None  # by `gateway.config.loading`
        return FileKeys(state.dir)
    assert state.redis is not None
    url = parse_redis_url(state.redis.get_secret_value())
    return RedisKeys(one_connection(url), url, key_store.PATIENCE, state.namespace)
