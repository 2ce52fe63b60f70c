"""Reload: the sections that may change in a running gateway, and the report of the change."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config.config_errors import ConfigError
from gateway.config.loading import change
from gateway.config.models import Config
from tests.support.gateways import document, pool

DIGEST = "0" * 64


def config(**more: Any) -> Config:
    return Config.model_validate({**document({"a": pool("http://10.0.0.1:8000")}), **more})


def test_the_same_configuration_changes_nothing() -> None:
    found = change(config(), config())
    assert (found.changed, found.restart) == ((), ())


def test_each_changed_path_is_reported_once_without_values() -> None:
    """Paths go as deep as names do: a list is a single place, and so is a section present on one side only."""
    before = config(routes={"chat": {"tiers": ["a"], "ttft": {"budget": "1s"}}, "old": {"tiers": ["a"]}})
    after = config(
        pools={"a": pool("http://10.0.0.1:8000", "http://10.0.0.2:8000", api_key="sk-another-secret")},
        routes={"chat": {"tiers": ["a"], "ttft": {"budget": "2s"}}, "new-1.5": {"tiers": ["a"]}},
        keys=[{"name": "app", "sha256": DIGEST}],
    )
    assert change(before, after).changed == (
        "pools.a.endpoints",
        "pools.a.api_key",
        "routes.chat.ttft.budget",
        "routes.old",
        'routes."new-1.5"',
        "keys",
    )


def test_startup_settings_stay_and_are_reported_as_needing_a_restart() -> None:
    """Other changes of the same file are applied."""
    after = config(
        server={"listen": "127.0.0.1:1", "admin": "127.0.0.1:0"},
        telemetry={"access_log": "stdout"},
        defaults={"connect": "7s"},
    )
    found = change(config(), after)
    assert (found.changed, found.restart) == (("defaults.connect",), ("server.listen", "telemetry.access_log"))
    assert (found.config.server, found.config.defaults.connect) == (config().server, 7.0)


def test_the_merged_configuration_is_validated() -> None:
    """Removing the keys is refused while the port is public: the port itself only changes with the next start."""
    public = {"listen": "0.0.0.0:8080", "admin": "127.0.0.1:0"}
    before = config(server=public, keys=[{"name": "app", "sha256": DIGEST}])
    with pytest.raises(ConfigError) as refused:
        change(before, config())
    assert "open mode is for loopback only" in str(refused.value)
