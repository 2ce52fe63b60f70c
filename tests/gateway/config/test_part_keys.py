"""Keys that parts add to the configuration are known as the core's own are."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from gateway.config.config_errors import ConfigError
from gateway.config.loading import load
from gateway.config.models import Config
from gateway.config.part_keys import config_of, keys_of, section_of
from gateway.config.schema import keys_at, schema
from policies.routes.route import Strict

FILE = """
pools:
  p: {{backend: vllm, model: m, endpoints: ["http://127.0.0.1:9"]{pool}}}
routes:
  chat: {{tiers: [p]{route}}}
passthrough: p
{section}
"""


class RouteKeys(Strict):
    most: int | None = Field(default=None, gt=0)
    """Most of something."""


class PoolKeys(Strict):
    zone_fee: bool = False


class Section(Strict):
    dir: str = ""


class Counting:
    RouteKeys, PoolKeys, Section, section = RouteKeys, PoolKeys, Section, "counting"


class Twice:
    RouteKeys = RouteKeys


def read(tmp_path: Path, kind: type[Config], route: str = "", pool: str = "", section: str = "") -> Config:
    path = tmp_path / "firsttoken.yaml"
    path.write_text(FILE.format(route=route, pool=pool, section=section), "utf-8")
    return load([path], {}, kind)


def test_the_configuration_without_keys_of_parts_is_the_core_s() -> None:
    assert config_of([object(), Strict]) is Config


def test_keys_of_a_part_are_read_of_routes_pools_and_a_section(tmp_path: Path) -> None:
    """With the presets and defaults of every route; of routes that no file names too."""
    config = read(tmp_path, config_of([Counting]), ", most: 3", ", zone_fee: yes", "counting: {dir: ./x}")
    assert keys_of(config.routes["chat"], RouteKeys).most == 3
    assert config.routes["chat"].ttft is not None
    assert keys_of(config.pools["p"], PoolKeys).zone_fee
    assert section_of(config, Section) == Section(dir="./x")
    assert isinstance(config.passthrough_route, RouteKeys)


def test_keys_have_their_defaults_where_the_file_was_read_without_the_part(tmp_path: Path) -> None:
    config = read(tmp_path, Config)
    assert keys_of(config.routes["chat"], RouteKeys) == RouteKeys()
    assert keys_of(config.pools["p"], PoolKeys) == PoolKeys()
    assert section_of(config, Section) == Section()


def test_the_schema_has_the_keys_with_their_descriptions() -> None:
    known = schema(config_of([Counting]))
    assert known["$defs"]["Route"]["properties"]["most"]["description"] == "Most of something."
    assert "zone_fee" in keys_at(known, ("pools", "p"))
    assert "counting" in known["properties"]
    assert "most" not in schema()["$defs"]["Route"]["properties"]


def test_a_wrong_key_or_value_is_refused_with_the_keys_that_are_known(tmp_path: Path) -> None:
    """Without the part, the key is unknown; with it, a misspelt one is told its name, a misplaced one its section."""
    with pytest.raises(ConfigError, match=r"routes\.chat\.most: unknown key"):
        read(tmp_path, Config, ", most: 3")
    with pytest.raises(ConfigError, match=r"routes\.chat\.mosst: unknown key.*did you mean 'most'"):
        read(tmp_path, config_of([Counting]), ", mosst: 3")
    with pytest.raises(ConfigError, match=r"routes\.chat\.zone_fee: unknown key.*pools\.NAME"):
        read(tmp_path, config_of([Counting]), ", zone_fee: yes")
    with pytest.raises(ConfigError, match=r"routes\.chat\.most: must be more than 0, got 0"):
        read(tmp_path, config_of([Counting]), ", most: 0")


class TierKeys(Strict):
    tiers: int = 1


class Tiers:
    RouteKeys = TierKeys


class SameSection:
    Section, section = TierKeys, "counting"


class CoreSection:
    Section, section = TierKeys, "server"


@pytest.mark.parametrize(
    "parts",
    [(Counting, Twice), (Tiers,), (Counting, SameSection), (CoreSection,)],
    ids=lambda parts: parts[-1].__name__,
)
def test_a_key_is_of_one_part(parts: tuple[type, ...]) -> None:
    """Of routes, of pools, and the name of a section: none takes another's, or the core's."""
    with pytest.raises(ValueError, match=r"have a key '(most|tiers|counting|server)'"):
        config_of(parts)
