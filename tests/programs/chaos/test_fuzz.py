"""A few hundred cases of `make fuzz`, and the OpenAPI document behind the generated bodies."""

from __future__ import annotations

import asyncio
import json

from gateway.proxy import GETS, OPERATIONS
from tests.programs.chaos import fuzz


async def test_random_input_gets_no_5xx_and_any_chunking_keeps_the_bytes() -> None:
    """Raw bytes, bodies by the OpenAPI document, chunk boundaries."""
    found = await asyncio.to_thread(fuzz.run, 300)
    assert found.failures == []


def test_the_openapi_document_has_the_paths_of_the_data_port() -> None:
    document = json.loads(fuzz.OPENAPI.read_text("utf-8"))
    methods = {path: set(operations) for path, operations in document["paths"].items()}
    assert methods == {**{path: {"post"} for path in OPERATIONS}, **{path: {"get"} for path in GETS}}
