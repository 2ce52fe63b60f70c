"""Whole answers of a real vLLM through the gateway, put together from streams where they can be, and asked for whole
where they cannot: the same JSON as the engine's own."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from random import Random
from typing import Any

from tests.programs.vllm.conftest import of_model
from tests.programs.vllm.fleet import Gateway
from tests.programs.vllm.test_dialect import TOOL

REQUESTS = int(os.environ.get("FIRSTTOKEN_ANSWERS", "500"))
RANDOM = ("id", "created", "metrics")  # of one answer


def chat(random: Random) -> dict[str, Any]:
    words = ("light", "stone", "river", "count", "why", "three", "ü", "日本", "{}")
    said = " ".join(random.choice(words) for _ in range(9))
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": said}],
        "max_tokens": random.randint(1, 24),
        "seed": random.randrange(1000),
        "temperature": random.choice((0.0, 0.0, 1.0)),
    }
    shares = {
        ("logprobs", True): 0.3,
        ("stop", (" a", "e")): 0.2,
        ("n", 2): 0.15,
        ("return_token_ids", True): 0.1,
        ("user", "someone"): 0.1,
    }
    body |= {name: value for (name, value), share in shares.items() if random.random() < share}
    if random.random() < 0.2:
        body |= {"tools": [TOOL], "tool_choice": random.choice(("auto", "none"))}
    if "logprobs" in body and random.random() < 0.7:
        body["top_logprobs"] = random.randint(0, 4)
    return body


def completion(random: Random) -> dict[str, Any]:
    body = chat(random)
    for name in ("tools", "tool_choice", "top_logprobs"):
        body.pop(name, None)
    body["prompt"] = body.pop("messages")[0]["content"]
    if "logprobs" in body:
        body["logprobs"] = random.randint(0, 4)
    return body


def answered(url: str, path: str, body: dict[str, Any]) -> Any:
    """The reply without what differs from answer to answer, with the order of members."""
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.headers["content-type"].startswith("application/json")
            pairs = json.load(reply, object_pairs_hook=list)
    except urllib.error.HTTPError as refusal:
        return refusal.code
    return [(name, value) for name, value in pairs if name not in RANDOM]


async def test_whole_answers_equal_the_engines_own(gateway: Gateway) -> None:
    """Of 500 random requests: tools, log probabilities, several choices, stops, token ids and completions included. The
    engine is asked twice before, so that its cache is in the same state."""
    random, differing, url = Random(5), [], of_model("small", 1)[0].url
    for number in range(REQUESTS):
        path, make = random.choice((("/v1/chat/completions", chat), ("/v1/completions", completion)))
        body = make(random)
        own = {**body, "model": "small"}
        await asyncio.to_thread(answered, url, path, own)
        expected = await asyncio.to_thread(answered, url, path, own)
        actual = await asyncio.to_thread(answered, gateway.url, path, {**body, "model": "native"})
        if actual != expected:
            differing.append((number, body, expected, actual))
    assert not differing, (len(differing), differing[:3])
