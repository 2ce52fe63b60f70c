"""Consistency of the demo's scene: every route has callers, every pool has engines, and the configuration is valid."""

from __future__ import annotations

import pytest

from backends.server_profiles import PROFILES
from gateway.config.loading import problems
from gateway.config.models import Config
from lab.demo.scene import CALLERS, CAST, ROUTES, document

URLS = {cast.pool: [f"http://127.0.0.1:{9000 + i}" for i in range(cast.count)] for cast in CAST}


@pytest.fixture(scope="module")
def config() -> Config:
    return Config.model_validate(document(URLS, 0, 0))


def test_the_scene_is_a_configuration_without_problems(config: Config) -> None:
    """No problem under `firsttoken check`."""
    assert problems(config) == []


def test_every_engine_of_the_scene_is_in_the_fleet(config: Config) -> None:
    """As many endpoints as servers, each with an existing profile."""
    assert {pool.name: len(pool.endpoints) for pool in config.fleet()} == {cast.pool: cast.count for cast in CAST}
    assert {cast.profile for cast in CAST} <= set(PROFILES)
    assert {pool.name for pool in config.fleet() if not pool.local} == {"api"}


def test_every_route_has_callers_and_a_budget(config: Config) -> None:
    """A row of the table without traffic, or without a promise, would show nothing."""
    assert sorted(callers.route for callers in CALLERS) == sorted(ROUTES) == sorted(config.routes)
    assert all(route.ttft is not None for route in config.routes.values())


def test_the_demo_listens_on_loopback(config: Config) -> None:
    """The demo has no keys, so both ports listen on loopback; the ports are the given ports."""
    server = Config.model_validate(document(URLS, 1234, 5678)).server
    assert (str(server.listen), str(server.admin)) == ("127.0.0.1:1234", "127.0.0.1:5678")
    assert config.server.listen.loopback
    assert config.server.admin.loopback
