"""/metrics has the library that encodes the prompts of each pool."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines

pytestmark = pytest.mark.virtual_time


def word_pieces(folder: Path) -> str:
    """Path of a tokenizer.json that the reference alone can encode."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(["some words"], trainers.WordPieceTrainer(special_tokens=["[UNK]"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


async def test_the_library_of_each_pool_is_a_metric(tmp_path: Path) -> None:
    """With the extra and without."""
    async with engines(1, "8b-l4") as (engine,):
        pools = {"chat": engine_pool(engine), "own": {**engine_pool(engine), "tokenizer": word_pieces(tmp_path)}}
        routes = {"chat": {"tiers": ["chat"]}, "own": {"tiers": ["own"]}}
        async with running(pools, routes) as gateway, aiohttp.ClientSession() as session:
            reply = await session.get(f"{gateway.admin_url}/metrics")
            page = await reply.text()
    library = "splintr-rs" if find_spec("splintr") else "tiktoken"
    assert f'firsttoken_tokenizer_info{{library="{library}",pool="chat"}} 1.0' in page
    assert 'firsttoken_tokenizer_info{library="tokenizers",pool="own"} 1.0' in page
