"""Isolation of two tenants on one engine: prompts of a tenant are never hits of another, by vLLM's own counts.

A single engine, with KV events, so that no hit is lost by routing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from gateway.admission.auth import CacheSalts, GroupMember
from tests.programs.vllm import fleet
from tests.programs.vllm.figures import Figures
from tests.programs.vllm.fleet import Gateway, Server
from tests.programs.vllm.talks import BLOCK
from tests.programs.vllm.traffic import text, user

PROMPTS, TOKENS = 12, 600
A, B, MATE = "sk-isolation-a", "sk-isolation-b", "sk-isolation-mate"
MEMBERS = [
    GroupMember(name, hashlib.sha256(key.encode()).digest(), group)
    for name, key, group in (("a", A, "team"), ("b", B, None), ("mate", MATE, "team"))
]
ROUTES = {"chat": {"tiers": ["small"], "ttft": {"budget": "30s"}}}


def config(engines: list[Server], keys: list[GroupMember]) -> dict[str, Any]:
    plain = [{"name": m.name, "sha256": m.digest.hex(), "cache_group": m.group} for m in keys]
    return {**fleet.config({"small": engines[:1]}, ROUTES, events=True), "keys": plain}


@pytest.fixture(scope="module")
def shared(engines: list[Server]) -> Iterator[Gateway]:
    """A gateway with keys: `a` and `mate` share a cache group, `b` has none."""
    with fleet.serving(config(engines, MEMBERS)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def open_to_all(engines: list[Server]) -> Iterator[Gateway]:
    """A gateway without keys."""
    with fleet.serving(config(engines, [])) as gateway:
        yield gateway


async def cached(gateway: Gateway, key: str, prompt: str, salt: str = "") -> int:
    """Cached tokens by vLLM's usage; the gateway's prediction is within a block."""
    async with AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0, timeout=120) as sdk:
        forged: Any = {"extra_headers": {"x-cache-salt": salt}, "extra_body": {"cache_salt": salt}} if salt else {}
        raw = await sdk.chat.completions.with_raw_response.create(
            model="chat", messages=[user(prompt)], max_tokens=2, **forged
        )
        usage = raw.parse().usage
    (record,) = await gateway.records_of([raw.headers["x-request-id"]])
    reported = usage.prompt_tokens_details.cached_tokens or 0
    assert reported == record["cached_tokens_reported"]
    assert abs(record["cached_tokens_predicted"] - reported) <= BLOCK
    return int(reported)


async def test_two_tenants_with_the_same_prompt_share_no_hit(shared: Gateway, figures: Figures) -> None:
    """The same tenant and a key of the same group do hit, which shows that the cache works."""
    found: dict[str, list[int]] = {"other": [], "same": [], "group": []}
    for i in range(PROMPTS):
        prompt = text(TOKENS, f"isolation-{i}")
        assert await cached(shared, A, prompt) == 0
        found["other"].append(await cached(shared, B, prompt))
        found["same"] += [await cached(shared, A, prompt), await cached(shared, B, prompt)]
        found["group"].append(await cached(shared, MATE, prompt))
    figures.at_most(f"isolation: tokens found of another tenant's {PROMPTS} prompts", sum(found["other"]), "", 0)
    figures.at_least("isolation: least found of one's own prompt", min(found["same"]), "tokens", TOKENS * 0.8)
    figures.at_least("isolation: least found of one's group's", min(found["group"]), "tokens", TOKENS * 0.8)


async def test_a_forged_salt_changes_nothing(shared: Gateway, figures: Figures) -> None:
    """Not even the other tenant's own salt, in body and header."""
    salts = CacheSalts("", MEMBERS)
    victims, own = salts.salt(MEMBERS[0]), salts.salt(MEMBERS[1])
    found = []
    for i in range(PROMPTS):
        prompt = text(TOKENS, f"forged-{i}")
        assert await cached(shared, A, prompt, salt="attacker") == 0
        found.append(await cached(shared, B, prompt, salt=victims))
        assert await cached(shared, A, prompt, salt=own) >= TOKENS * 0.8
    figures.at_most(f"isolation: tokens found with the victim's salt, {PROMPTS} prompts", sum(found), "", 0)


async def test_salted_prompts_are_bound_to_their_chains(shared: Gateway, figures: Figures) -> None:
    """Block hashes in KV events include the salt."""
    [known] = [endpoint["resident"] for endpoint in shared.endpoints()]
    assert known["anchored"] + known["unanchored"] >= PROMPTS
    share = 100 * known["anchored"] / (known["anchored"] + known["unanchored"])
    figures.at_least("isolation: salted prompts tied to the engine's own chain", share, "%", 99)


async def test_without_keys_callers_share_one_cache(open_to_all: Gateway, figures: Figures) -> None:
    """So the separation of tenants is due to the salt."""
    prompt = text(TOKENS, "open")
    await cached(open_to_all, A, prompt)
    figures.at_least("without keys: found of another caller's prompt", await cached(open_to_all, B, prompt), "", 480)
