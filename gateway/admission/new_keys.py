"""Opens the store of callers' keys that the configuration names, and makes and changes the keys in it, for `firsttoken
keys` and the admin port."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from pydantic import ValidationError

from gateway.admission import key_store
from gateway.admission.key_file import FileKeys
from gateway.admission.key_store import KeyStore
from gateway.admission.redis_keys import RedisKeys, one_connection
from gateway.config.config_errors import did_you_mean
from gateway.config.field_types import parse_redis_url
from gateway.config.models import Config, Key, StateSection

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,63}")  # of a key that is made; older ones keep theirs
NAME_RULE = "1 to 64 letters, digits and . _ : @ + -, a letter or a digit first"
KIND = "ft-"  # prefix of every key, so secret scanners recognise leaked keys
SETTINGS = (
    "routes",
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "monthly_cost_usd",
    "cache_group",
    "weight",
)


class InvalidKey(Exception):
    """`problems`: setting and message."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{setting}: {message}" for setting, message in problems))
        self.problems = problems


def new_key(config: Config, name: object, settings: Mapping[str, object]) -> tuple[str, Key]:
    """The text of a new key, and the key to store. Raises InvalidKey."""
    text = KIND + secrets.token_urlsafe(32)
    key = _valid(config, {"name": name, "sha256": sha256(text.encode()).hexdigest(), **settings})
    if not NAME.fullmatch(key.name):
        raise InvalidKey([("name", f"a name has {NAME_RULE}")])
    return text, key


def changed_key(config: Config, key: Key, settings: Mapping[str, object]) -> Key:
    """The key with other settings; None removes one. Raises InvalidKey."""
    kept = {name: value for name in SETTINGS if (value := getattr(key, name)) is not None and name not in settings}
    given = {name: value for name, value in settings.items() if value is not None}
    return _valid(config, {"name": key.name, "sha256": key.sha256, **kept, **given})


def in_file(config: Config, name: str) -> bool:
    return any(key.name == name for key in config.keys)


def is_hidden(config: Config, key: Key) -> bool:
    """The configuration file gives the name of this stored key to another digest."""
    return any(other.name == key.name and other.sha256 != key.sha256 for other in config.keys)


def _valid(config: Config, settings: Mapping[str, Any]) -> Key:
    try:
        key = Key.model_validate({name: value for name, value in settings.items() if value is not None})
    except ValidationError as error:
        raise InvalidKey([(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]) from None
    if problems := [*_unknown_routes(config, key)]:
        raise InvalidKey(problems)
    return key


def _unknown_routes(config: Config, key: Key) -> Iterator[tuple[str, str]]:
    known = [route.name for route in config.all_routes]
    for route in key.routes or ():
        if route not in known:
            yield "routes", f"no route '{route}'{did_you_mean(route, known)}"


def operator_store(state: StateSection) -> KeyStore:
    """The store that `state.keys` names. A question may take PATIENCE."""
    if state.keys == "dir":
        assert state.dir is not None  # by `gateway.config.loading`
        return FileKeys(state.dir)
    assert state.redis is not None
    url = parse_redis_url(state.redis.get_secret_value())
    return RedisKeys(one_connection(url), url, key_store.PATIENCE, state.namespace)
