"""Embeddings and `/tokenize`, passed through to a real vLLM."""

from __future__ import annotations

import aiohttp

from tests.programs.vllm.fleet import Gateway, Server
from tests.programs.vllm.traffic import client, user


async def test_embeddings_of_a_chat_model_are_refused_and_harm_nobody(pair: Gateway) -> None:
    """vLLM serves no embeddings of a chat model: a 4xx for that caller, and chat goes on."""
    async with aiohttp.ClientSession(pair.url) as session:
        for _ in range(3):
            async with session.post("/v1/embeddings", json={"model": "chat", "input": "text"}) as reply:
                assert 400 <= reply.status < 500
    async with client(pair.base_url) as sdk:
        answered = await sdk.chat.completions.create(
            model="chat", messages=[user("Say hello to the world.")], max_tokens=3
        )
    assert answered.choices[0].message.content


async def test_tokenize_passes_through(pair: Gateway, engines: list[Server]) -> None:
    async with aiohttp.ClientSession() as session:
        asked = {"prompt": "Say hello to the world."}
        async with session.post(f"{pair.url}/tokenize", json={"model": "chat", **asked}) as reply:
            through = await reply.json()
        async with session.post(f"{engines[0].url}/tokenize", json={"model": "small", **asked}) as reply:
            assert through == await reply.json()
