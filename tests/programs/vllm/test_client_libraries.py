"""Released client libraries before real vLLM engines: the checks of tests/programs/clients write docs/clients.md."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from scripts import vllm_servers
from tests.programs.clients import page, vllm_engines
from tests.programs.clients.manifest import ROOT, Client, clients
from tests.programs.clients.run import VLLM, ClientRun, gateway, prepare, run

Runs = dict[str, ClientRun]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """By client; `settings` writes them to the page."""
    return {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def settings(runs: Runs) -> AsyncIterator[dict[str, str]]:
    """Of a gateway in front of two engines of the rehearsed model."""
    try:
        vllm_servers.ready([vllm_engines.MODEL])
    except FileNotFoundError as missing:
        pytest.skip(f"{missing}: make vllm")
    async with gateway(VLLM) as found:
        yield found
    if runs:
        page.write(ROOT / "docs/clients.md", VLLM, runs)


@pytest.mark.parametrize("client", clients(), ids=lambda client: client.name)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_passes_its_checks(client: Client, settings: dict[str, str], runs: Runs) -> None:
    assert client.installed, f"not installed: python -m scripts.clients_setup {client.name}"
    found = runs[client.name] = await run(prepare(client), settings | vllm_engines.left_out(client.name))
    assert (found.failed, found.ended) == ({}, "")
    assert found.passed
