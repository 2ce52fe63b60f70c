"""Kinds of backends."""

from __future__ import annotations

import pytest

from backends.catalog import KINDS, BackendKind, build
from backends.http.connection_pool import BackendAddress
from backends.interface import Backend, BackendConfig, HttpCall


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_can_be_built(kind: BackendKind) -> None:
    """The name in the configuration is the name in the metrics."""
    backend: Backend = build(BackendConfig(kind.name, "m", api_key="sk-x"))
    assert (backend.kind, backend.local) == (kind.name, kind.local)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_kind_that_needs_a_key_is_an_api_with_a_base_url(kind: BackendKind) -> None:
    """An API has an address, its own or a customer's, and no modelled queue; default addresses are valid."""
    if kind.needs_key:
        assert kind.base_url is not None or kind.name == "azure"
        assert not kind.local
    if kind.base_url is not None:
        BackendAddress.parse(kind.base_url)
    assert kind.doc


def test_an_unknown_kind_is_refused_with_a_suggestion() -> None:
    """A misspelling gets the closest kind; any other name the list."""
    with pytest.raises(ValueError, match="there is no backend 'vlm'; did you mean 'vllm'"):
        build(BackendConfig("vlm", "m"))
    with pytest.raises(ValueError, match="there are vllm, sglang"):
        build(BackendConfig("???", "m"))


def test_an_api_without_a_key_is_refused() -> None:
    """The caller's own key is never sent in place of the backend's."""
    with pytest.raises(ValueError, match="'openai' needs an api_key"):
        build(BackendConfig("openai", "m"))
    build(BackendConfig("openai", "m", headers={"Authorization": "Bearer x"}))


@pytest.mark.parametrize(
    ("kind", "probe", "load"),
    [
        ("vllm", "/health", "/metrics"),
        ("sglang", "/health", "/metrics"),
        ("simulated", "/health", "/metrics"),
        ("llamacpp", "/health", "/metrics"),
        ("ollama", "/api/version", None),
        ("compatible", None, None),
        ("openai-compatible", None, None),
        ("groq", None, None),
    ],
)
def test_probe_and_load_paths_by_kind(kind: str, probe: str | None, load: str | None) -> None:
    """A path that a server does not know must not make the server look down."""
    backend = build(BackendConfig(kind, "m", api_key="sk-x"))
    expected = tuple(HttpCall("GET", path) if path else None for path in (probe, load))
    assert (backend.probe(), backend.load()) == expected
