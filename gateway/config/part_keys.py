"""Keys that parts add to the configuration: to every route, to every pool, and sections of their own.

A part names models whose fields are the keys (`RouteKeys`, `PoolKeys`, `Section`); each field has a default, and a
docstring used as description in the JSON Schema. The schema, `check`, error messages and reloads treat these keys as
the core's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import GenericAlias
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, create_model

from gateway.config.models import Config
from gateway.config.pool_section import PoolSection
from policies.routes.route import Route, Strict

M = TypeVar("M", bound=BaseModel)
K = TypeVar("K", bound=Strict)


def config_of(parts: Iterable[object]) -> type[Config]:
    """The configuration with the keys of parts; Config itself where none has any. Raises ValueError for a key that is
    there twice."""
    parts = tuple(parts)
    routes, pools = _declared(parts, "RouteKeys"), _declared(parts, "PoolKeys")
    sections = _sections(parts)
    if not (routes or pools or sections):
        return Config
    _distinct(Config, [name for name, _ in sections])
    changed: dict[str, Any] = {name: (section, section()) for name, section in sections}
    route = _joined(Route, routes)
    changed["routes"] = _mapping("routes", route)
    changed["pools"] = _mapping("pools", _joined(PoolSection, pools))
    made = create_model("Config", __base__=Config, __module__=Config.__module__, **changed)
    made.route = route
    return made


def keys_of(section: BaseModel, kind: type[K]) -> K:
    """The keys of a part in a route or a pool, by their defaults where the file was read without the part."""
    return section if isinstance(section, kind) else kind()


def section_of(config: Config, kind: type[K]) -> K:
    """The section of a part, by its defaults where the file was read without the part."""
    return next((value for _, value in config if isinstance(value, kind)), kind())


def _declared(parts: Sequence[object], name: str) -> list[type[Strict]]:
    return [found for part in parts if (found := getattr(part, name, None)) is not None]


def _sections(parts: Sequence[object]) -> list[tuple[str, type[Strict]]]:
    """Name and model of each section."""
    return [(getattr(part, "section", ""), section) for part in parts for section in _declared((part,), "Section")]


def _joined(base: type[M], added: Sequence[type[Strict]]) -> type[M]:
    """A model with the fields of all."""
    _distinct(base, [name for model in added for name in model.model_fields])
    if not added:
        return base
    return cast("type[M]", create_model(base.__name__, __base__=(base, *added), __module__=base.__module__))


def _mapping(name: str, model: type[BaseModel]) -> tuple[Any, Any]:
    """A field of the configuration, with models of another type as values."""
    field = Config.model_fields[name]
    key, _ = get_args(field.annotation)
    return GenericAlias(Mapping, (key, model)), field


def _distinct(base: type[BaseModel], names: Iterable[str]) -> None:
    for name, times in Counter((*base.model_fields, *names)).items():
        if times > 1:
            raise ValueError(f"two parts, or a part and the core, have a key '{name}'")
