"""Who is asking: keys as digests, told apart in constant time."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from gateway.admission.auth import ANYONE, Keys, Tenant
from gateway.api.api_error import ApiError


def tenant(name: str, key: str, routes: frozenset[str] | None = None) -> Tenant:
    return Tenant(name, hashlib.sha256(key.encode()).digest(), routes)


WEB, BATCH, LAB = tenant("web", "sk-web"), tenant("batch", "sk-batch"), tenant("lab", "schlüssel 鍵")
ALL = Keys([WEB, BATCH, LAB])


def refused(authorization: str | None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ALL.tenant(authorization)
    return caught.value


def test_without_keys_the_port_is_open() -> None:
    """Whoever asks, and whatever they send; the configuration allows that on loopback only."""
    assert [Keys().tenant(value) for value in (None, "", "Bearer x")] == [ANYONE] * 3
    assert ANYONE.may_use("any route")


@pytest.mark.parametrize(
    ("authorization", "found"),
    [
        ("Bearer sk-web", WEB),
        ("bearer sk-batch", BATCH),
        ("BEARER  sk-web ", WEB),
        ("Bearer schlüssel 鍵", LAB),
    ],
)
def test_a_key_names_its_tenant(authorization: str, found: Tenant) -> None:
    """The scheme in any case (RFC 9110 section 11.1); the key to the byte."""
    assert ALL.tenant(authorization) is found


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer sk-we",
        "Bearer sk-webb",
        "Bearer SK-WEB",
        "Bearer sk-web\0",
        "Bearer x" * 10_000,
        "Bearer \udcff\udcfe",
        "Bearer " + WEB.digest.hex(),
        "Bearer sk-web,sk-batch",
    ],
)
def test_an_unknown_key_is_401_and_learns_nothing(authorization: str) -> None:
    """One text for all of them: not how near it was, nor whose. A digest is not a key."""
    refusal = refused(authorization)
    assert (refusal.status, refusal.code, refusal.message) == (401, "invalid_api_key", "The API key is not known here.")
    assert refusal.headers == {"www-authenticate": "Bearer"}


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "Basic c2std2Vi", "sk-web", "Token sk-web"])
def test_a_missing_key_is_401_and_says_how_to_send_one(authorization: str | None) -> None:
    """Another scheme is no key."""
    refusal = refused(authorization)
    assert (refusal.status, refusal.code) == (401, "invalid_api_key")
    assert refusal.message == "No API key was given. Send 'authorization: Bearer <key>'."


@pytest.mark.parametrize("key", ["sk-web", "sk-batch", "schlüssel 鍵", "sk-nobody"])
def test_every_digest_is_compared_whichever_matches(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Always all of them, and digests only: time tells neither which one it was nor how much of it was right."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return original(a, b)

    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    try:
        ALL.tenant(f"Bearer {key}")
    except ApiError:
        assert key == "sk-nobody"
    digest = hashlib.sha256(key.encode()).digest()
    assert compared == [(WEB.digest, digest), (BATCH.digest, digest), (LAB.digest, digest)]


def test_a_key_opens_its_own_routes_only() -> None:
    """None is every route; an empty set is none."""
    assert tenant("all", "k").may_use("chat")
    limited = tenant("some", "k", frozenset({"chat"}))
    assert (limited.may_use("chat"), limited.may_use("agent")) == (True, False)
    assert not tenant("none", "k", frozenset()).may_use("chat")
