"""Configuration files and invalid values shared by the loading tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config.config_errors import ConfigError
from gateway.config.loading import load
from gateway.config.models import Config
from gateway.config.yaml_source import FOLDER

POOLS = """\
pools:
  small: {backend: vllm, model: qwen3-8b, endpoints: [http://10.0.0.11:8000]}
  large: {backend: vllm, model: qwen3-72b, endpoints: [http://10.0.1.11:8000]}
"""


ROUTES = "routes:\n  chat: {tiers: [large, small]}\n"


PRESETS = sorted(FOLDER.glob("*.yaml"))


DIGEST = "0123456789abcdef" * 4


def loaded(*texts: str, **environ: str) -> Config:
    paths = [Path(f"{name}.yaml") for name, _ in zip("fgh", texts, strict=False)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, "utf-8")
    return load(paths, environ)


def refusal(*texts: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(*texts, **environ)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def pool(**fields: str) -> str:
    fields = {"backend": "vllm", "model": "m", "endpoints": "[http://a:1]"} | fields
    return f"pools: {{p: {{{', '.join(f'{key}: {value}' for key, value in fields.items() if value)}}}}}\n"


def route(text: str = "", tiers: str = "[p]") -> str:
    return f"{pool()}routes: {{r: {{tiers: {tiers}, {text}}}}}"


def places(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every path in a document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def spoilt(data: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy of `data` with `value` at `path`."""
    if not path:
        return value
    copy = data.copy()
    copy[path[0]] = spoilt(data[path[0]], path[1:], value)
    return copy
