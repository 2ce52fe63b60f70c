"""`check --live` says of an engine's own pages what a running gateway says."""

from __future__ import annotations

import json

import pytest

from tests.gateway.cli.live.test_live_check import JSON, Command, command, here  # noqa: F401 - fixtures
from tests.support.side_pages import SidedEngine
from tests.support.simulated import engine_pool, engines
from tests.support.upstream import Received, Script, reply

LISTED = reply(json.dumps({"object": "list", "data": [{"id": "served"}]}).encode(), "200 OK", JSON)


class ListedEngine(SidedEngine):
    def script(self, received: Received) -> Script:
        return [LISTED] if received.target == "/v1/models" else super().script(received)


@pytest.mark.parametrize("fault", ["404", "500", "503", "garbage", "another product"])
async def test_a_page_that_fails_is_a_warning_with_its_reason(fault: str, command: Command) -> None:  # noqa: F811
    """Callers are answered: exit code 0, and not `ok`."""
    async with ListedEngine(fault) as engine:
        [line] = await command.run({"a": {"backend": "vllm", "model": "served", "endpoints": [engine.url]}})
    assert (
        command.code,
        line.startswith(f"warning: a/{engine.url[7:]} ({engine.url}): its load is not known: its /metrics"),
    ) == (0, True)
    assert [each.split()[-1] for each in command.out.splitlines() if each.startswith("a/")] == ["load"]


async def test_ranks_that_a_server_does_not_have_are_a_fault(command: Command) -> None:  # noqa: F811
    async with engines(1, ranks=(4, 5, 6, 7)) as [server]:
        ranks = [{"url": server.url, "dp_rank": rank} for rank in (3, 4)]
        [line] = await command.run({"a": {**engine_pool(), "endpoints": ranks}})
    assert command.code == 2
    assert line == (
        f"fault: a/127.0.0.1:{server.port}/dp3 ({server.url}): this server has ranks 4..7, not 3, by its /metrics;"
        " correct dp_rank of the endpoint"
    )


async def test_a_sleeping_engine_is_told_and_not_asked(command: Command) -> None:  # noqa: F811
    """A question would wait until somebody wakes it."""
    async with engines() as [server]:
        server.sleeping.sleep()
        [line] = await command.run({"a": engine_pool(server)})
        assert (command.code, len(server.requests)) == (0, 0)
    assert line.startswith(f"warning: a/127.0.0.1:{server.port} ({server.url}): is asleep: it gets no request until")
