"""Keys of providers are secrets; words that stand in for a key are not."""

from __future__ import annotations

import pytest

from backends.scrubbing import is_secret


@pytest.mark.parametrize(
    "value",
    [
        "sk-1234",
        "sk-proj-abcdefghijkl",
        "sk-ant-api03-x_y",
        "gsk_abcdef",
        "xai-abcdef",
        "AIzaSyA123",
        "hf_abcdef",
        "nvapi-abcdef",
        "0123456789abcdef",
    ],
)
def test_a_key_of_a_provider_is_a_secret(value: str) -> None:
    """By its prefix, or by its length."""
    assert is_secret(value)


@pytest.mark.parametrize("value", ["", "none", "EMPTY", "test", "token", "x", "ollama", "sk-", "sk-no", "hf_x"])
def test_a_placeholder_is_no_secret(value: str) -> None:
    """Nor is a bare prefix."""
    assert not is_secret(value)
