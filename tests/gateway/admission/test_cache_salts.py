"""Whose prompts are cached under which name."""

from __future__ import annotations

import hashlib
import re

import pytest

from gateway.admission.auth import CacheSalts, GroupMember


def key(name: str, group: str | None = None, text: str = "") -> GroupMember:
    return GroupMember(name, hashlib.sha256((text or f"sk-{name}").encode()).digest(), group)


A, B, WEB, WEB2 = key("a"), key("b"), key("app", "web"), key("site", "web")
ALL = [A, B, WEB, WEB2]
SECRETS = pytest.mark.parametrize("secret", ["", "a configured secret"])


@SECRETS
def test_every_key_has_a_name_of_its_own_but_those_of_a_group(secret: str) -> None:
    """To share is the operator's word, for every key that does."""
    salts = CacheSalts(secret, ALL)
    a, b, web, web2 = (salts.salt(member) for member in ALL)
    assert web == web2
    assert len({a, b, web}) == 3


@SECRETS
def test_a_key_that_is_called_as_a_group_is_no_member(secret: str) -> None:
    salts = CacheSalts(secret, [*ALL, key("web")])
    assert salts.salt(key("web")) != salts.salt(WEB)


@SECRETS
def test_a_name_is_one_that_engines_take(secret: str) -> None:
    """vLLM refuses `@ / \\ NUL`, and more than 128 characters."""
    assert re.fullmatch(r"[0-9a-f]{32}", CacheSalts(secret, ALL).salt(A))


@SECRETS
def test_replicas_and_restarts_agree(secret: str) -> None:
    """In whatever order the keys were written."""
    assert [CacheSalts(secret, ALL).salt(m) for m in ALL] == [CacheSalts(secret, ALL[::-1]).salt(m) for m in ALL]


def test_a_key_that_comes_or_goes_empties_no_other_groups_caches() -> None:
    """But those of its own group, unless a secret is configured."""
    more = [*ALL, key("c"), key("shop", "web")]
    before, after = CacheSalts("", ALL), CacheSalts("", more)
    assert (before.salt(A), before.salt(B)) == (after.salt(A), after.salt(B))
    assert before.salt(WEB) != after.salt(WEB)
    assert CacheSalts("configured", ALL).salt(WEB) == CacheSalts("configured", more).salt(WEB)


def test_a_name_tells_nobody_elses() -> None:
    """It depends on what only the operator has: the keys' digests, or the secret."""
    assert CacheSalts("", [key("a", text="sk-one")]).salt(key("a", text="sk-one")) != CacheSalts("", [A]).salt(A)
    assert CacheSalts("one secret", ALL).salt(A) != CacheSalts("other secret", ALL).salt(A)
    assert CacheSalts("", []).salt(A) == CacheSalts("", [A]).salt(A)  # a key that came later has its own digest
