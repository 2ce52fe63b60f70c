"""Cache salts: prompts of different cache groups never share cached blocks."""

from __future__ import annotations

import hashlib
import re

import pytest

from gateway.admission.auth import CacheSalts, GroupMember

pytestmark = pytest.mark.virtual_time


def key(name: str, group: str | None = None, text: str = "") -> GroupMember:
    return GroupMember(name, hashlib.sha256((text or f"sk-{name}").encode()).digest(), group)


A, B, WEB, WEB2 = key("a"), key("b"), key("app", "web"), key("site", "web")
ALL = [A, B, WEB, WEB2]
SECRETS = pytest.mark.parametrize("secret", ["", "a configured secret"])


@SECRETS
def test_every_key_has_its_own_salt_except_within_a_group(secret: str) -> None:
    """Sharing needs a configured cache group."""
    salts = CacheSalts(secret, ALL)
    a, b, web, web2 = (salts.salt(member) for member in ALL)
    assert web == web2
    assert len({a, b, web}) == 3


@SECRETS
def test_a_key_named_like_a_group_is_no_member(secret: str) -> None:
    salts = CacheSalts(secret, [*ALL, key("web")])
    assert salts.salt(key("web")) != salts.salt(WEB)


@SECRETS
def test_a_salt_is_valid_for_engines(secret: str) -> None:
    r"""vLLM refuses `@ / \ NUL`, and more than 128 characters."""
    assert re.fullmatch(r"[0-9a-f]{32}", CacheSalts(secret, ALL).salt(A))


@SECRETS
def test_replicas_and_restarts_compute_equal_salts(secret: str) -> None:
    """In any order of the configured keys."""
    assert [CacheSalts(secret, ALL).salt(m) for m in ALL] == [CacheSalts(secret, ALL[::-1]).salt(m) for m in ALL]


def test_an_added_key_changes_only_the_salt_of_its_group() -> None:
    """With a configured secret, no salt at all."""
    more = [*ALL, key("c"), key("shop", "web")]
    before, after = CacheSalts("", ALL), CacheSalts("", more)
    assert (before.salt(A), before.salt(B)) == (after.salt(A), after.salt(B))
    assert before.salt(WEB) != after.salt(WEB)
    assert CacheSalts("configured", ALL).salt(WEB) == CacheSalts("configured", more).salt(WEB)


@SECRETS
def test_a_key_made_anew_under_a_revoked_name_does_not_read_the_old_ones_cache(secret: str) -> None:
    """Another owner may have it. A group's salt outlives its keys where there is a secret."""
    old, new = key("a"), key("a", text="sk-anew")
    assert CacheSalts(secret, [old, B]).salt(old) != CacheSalts(secret, [new, B]).salt(new)
    site = key("app", "web", text="sk-anew")
    assert (CacheSalts(secret, [WEB]).salt(WEB) == CacheSalts(secret, [site]).salt(site)) == bool(secret)


def test_a_salt_cannot_be_computed_from_key_names() -> None:
    """A salt depends on the digests of the keys, or on the secret."""
    assert CacheSalts("", [key("a", text="sk-one")]).salt(key("a", text="sk-one")) != CacheSalts("", [A]).salt(A)
    assert CacheSalts("one secret", ALL).salt(A) != CacheSalts("other secret", ALL).salt(A)
    assert CacheSalts("", []).salt(A) == CacheSalts("", [A]).salt(A)  # a key added later has its own digest
