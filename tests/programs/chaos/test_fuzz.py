"""A few hundred cases of `make fuzz`, and the OpenAPI document behind the generated bodies."""

from __future__ import annotations

import asyncio
import json

from backends.interface import Operation
from gateway.api.inference_request import KEY_HEADERS
from gateway.api.paths import canonical
from gateway.parts.responses.stored_responses import PATHS
from gateway.proxy import METHODS
from tests.programs.chaos import fuzz


async def test_random_input_gets_no_5xx_and_any_chunking_keeps_the_bytes() -> None:
    """Raw bytes, bodies by the OpenAPI document, chunk boundaries."""
    found = await asyncio.to_thread(fuzz.run, 300)
    assert found.failures == []


def test_the_openapi_document_has_every_header_of_a_key() -> None:
    document = json.loads(fuzz.OPENAPI.read_text("utf-8"))
    schemes = document["components"]["securitySchemes"]
    assert {each.get("name", "authorization") for each in schemes.values()} == set(KEY_HEADERS)
    assert [*filter(None, document["security"])] == [{name: []} for name in schemes]


def test_the_openapi_document_has_the_paths_of_the_data_port() -> None:
    """Under the gateway's own names, and Azure's deployments."""
    document = json.loads(fuzz.OPENAPI.read_text("utf-8"))
    methods = {path: set(operations) for path, operations in document["paths"].items()}
    azures = {path: methods.pop(path) for path in list(methods) if path.startswith("/openai/")}
    assert {path: {each.upper() for each in found} for path, found in methods.items()} == {
        path: set(served) - {"HEAD"} for path, served in {**METHODS, **PATHS}.items()
    }
    assert {canonical(path)[0] for path in azures} == {
        Operation.CHAT.value,
        Operation.COMPLETION.value,
        Operation.EMBEDDINGS.value,
    }
    assert all(found == {"post"} and canonical(path)[1] == "{deployment}" for path, found in azures.items())
