"""A probe with the gateway's own credential and model, where one caller alone has met failures."""

from __future__ import annotations

import json
from time import monotonic
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.parts.witness.part import WitnessPart
from policies.blame.blame import BLAME
from policies.fleet.fleet import AttemptReport
from policies.types import AttemptOutcome, Endpoint, Health
from tests.support.builders import STREAMED, WHOLE, get
from tests.support.gateways import pool, running
from tests.support.learned_fleet import send
from tests.support.simulated import eventually
from tests.support.upstream import GATE, Script, Upstream, reply

pytestmark = pytest.mark.virtual_time

JSON = "content-type: application/json"
REVOKED: Script = [reply(b'{"error":{"message":"no"}}', "401 Unauthorized", JSON)]
BAD: Script = [reply(b'{"error":{"message":"no","type":"invalid_request_error"}}', "400 Bad Request", JSON)]
UNSTREAMED: Script = [reply(WHOLE, "200 OK", JSON)]
CLAUDE: Script = [reply(b'{"type":"error","error":{"type":"invalid_request_error","message":"no"}}', "400 Bad", JSON)]


def endpoint(gateway: Gateway) -> Endpoint:
    return gateway.runtime.current.pools["api"].endpoints[0]


def refuse(gateway: Gateway, caller: str) -> None:
    """A request of the caller gets a 401."""
    now = monotonic()
    key = send(gateway.fleet, endpoint=endpoint(gateway), now=now, caller=caller)
    report = AttemptReport(blame=BLAME["auth"], cause="401 invalid_api_key")
    gateway.fleet.on_ended(key, AttemptOutcome.MISCONFIGURED, now, report)


def health(gateway: Gateway, caller: str = "") -> Health:
    now = monotonic()
    return gateway.fleet.snapshot_for(caller, now).loads[endpoint(gateway).id].health


async def test_a_probe_asks_for_one_token_with_the_credential_and_model_of_the_configuration() -> None:
    """Nothing of the caller's request is in it."""
    async with Upstream([STREAMED]) as upstream, running({"api": pool(upstream.url)}) as gateway:
        refuse(gateway, "a")
        await eventually(lambda: gateway.fleet.view.statistics(endpoint(gateway).id, monotonic()).samples == 1)
        [received] = upstream.requests
        body: dict[str, Any] = json.loads(received.body)
        assert received.headers["authorization"] == "Bearer sk-backend"
        assert (body["model"], body["messages"]) == ("served", [{"role": "user", "content": "hi"}])
        assert body.get("max_tokens", body.get("max_completion_tokens")) == 1


@pytest.mark.parametrize(
    ("script", "down"), [(REVOKED, Health.DOWN), (BAD, Health.UP), (STREAMED, Health.UP), (UNSTREAMED, Health.UP)]
)
async def test_only_a_probe_with_the_same_result_takes_the_endpoint_from_all(script: Any, down: Health) -> None:
    """An answer of any kind, also a refusal of the probe itself, does not."""
    script = [script] if isinstance(script, bytes) else script
    async with Upstream(script) as upstream, running({"api": pool(upstream.url)}) as gateway:
        refuse(gateway, "a")
        assert (health(gateway, "a"), health(gateway, "b")) == (Health.DOWN, Health.UP)
        await eventually(lambda: upstream.requests and not gateway.part(WitnessPart).running)
        assert health(gateway, "b") is down


async def test_no_second_probe_while_one_runs_or_soon_after() -> None:
    """However often the caller repeats its request."""
    async with Upstream([GATE, STREAMED]) as upstream, running({"api": pool(upstream.url)}) as gateway:
        for _ in range(50):
            refuse(gateway, "a")
        await eventually(lambda: upstream.requests)
        upstream.proceed()
        await eventually(lambda: not gateway.part(WitnessPart).running)
        for _ in range(50):
            refuse(gateway, "a")
        assert (len(upstream.requests), gateway.part(WitnessPart).running) == (1, 0)


async def test_a_pool_of_the_callers_own_model_names_is_not_probed() -> None:
    """There is no model of the configuration to ask for."""
    async with Upstream([STREAMED]) as upstream:
        pools = {"api": pool(upstream.url)}
        async with running(pools, {}, passthrough="api") as gateway:
            refuse(gateway, "a")
            assert gateway.part(WitnessPart).running == 0


async def test_a_server_of_messages_is_asked_in_its_own_dialect() -> None:
    async with Upstream(CLAUDE) as upstream:
        pools = {"api": pool(upstream.url, backend="anthropic")}
        async with running(pools) as gateway:
            refuse(gateway, "a")
            await eventually(lambda: upstream.requests and not gateway.part(WitnessPart).running)
            [received] = upstream.requests
            assert (received.target, json.loads(received.body)["max_tokens"]) == ("/v1/messages", 1)


async def test_the_views_show_what_is_believed_of_an_endpoint() -> None:
    """GET /fleet and the reason, for how many callers."""
    async with Upstream([GATE, STREAMED]) as upstream, running({"api": pool(upstream.url)}) as gateway:
        refuse(gateway, "a")
        status, _, body = await get(gateway.admin_url, "/fleet")
        [entry] = json.loads(body)
        assert status == 200
        assert [(each["what"], each["why"], each["callers"]) for each in entry["believed"]] == [
            ("down", "the provider refuses the gateway's key (401 invalid_api_key)", 1)
        ]
