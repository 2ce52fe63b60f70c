"""The configuration without a file: the API keys in the environment.

Every API whose key is set becomes a pool, and the first pool takes every model name unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.catalog import KINDS
from gateway.config.config_errors import ConfigError, SourceLocation
from gateway.config.yaml_source import Document


def environment(environ: Mapping[str, str]) -> Document:
    """Builds the configuration from the environment."""
    document = Document()
    pools: dict[str, Any] = {}
    for kind in (name for name, kind in KINDS.items() if kind.needs_key):
        if environ.get(f"{kind.upper()}_API_KEY"):
            pools[kind] = {"backend": kind}
            for key in ("api_key", "base_url"):
                _take(document, pools[kind], kind, key, environ)
    if not pools:
        raise ConfigError([_nothing()])
    document.data.update(pools=pools, passthrough=next(iter(pools)))
    return document


def _take(document: Document, pool: dict[str, Any], kind: str, key: str, environ: Mapping[str, str]) -> None:
    variable, path = f"{kind.upper()}_{key.upper()}", ("pools", kind, key)
    if value := environ.get(variable):
        pool[key] = value
        document.places[path] = SourceLocation(f"environment variable {variable}")
        document.raw[path] = f"${{{variable}}}"


def _nothing() -> str:
    variables = ", ".join(f"{name.upper()}_API_KEY" for name, kind in KINDS.items() if kind.needs_key)
    return f"no --config, and none of {variables} is set: name a file, set a key, or try `firsttoken demo`"
