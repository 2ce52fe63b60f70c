"""The words of a provider about its limits and failures reach the caller, without what no caller may read."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from policies.types import AttemptOutcome
from tests.support.builders import CHAT, DONE, FINISH, TOKEN, calling, conversing, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

JSON = "content-type: application/json"
RPM = (
    "Rate limit reached for gpt-4o in organization org-AbCd1234efgh56 on requests per min (RPM): Limit 500, Used 500, "
    "Requested 1. Please try again in 120ms. Visit https://platform.openai.com/account/rate-limits to learn more."
)
PRICE = {"input": 1000.0, "output": 4000.0}


def error(status: str, message: str, /, **more: Any) -> Script:
    return [reply(json.dumps({"error": {"message": message, **more}}).encode(), status, JSON)]


async def told(script: Script, *headers: str, path: str = "", body: Any = CHAT, **more: Any) -> tuple[int, Any]:
    """Status and error object of the only endpoint's failure."""
    async with Upstream(script) as server:
        pools = {"only": pool(server.url, **more)}
        route = {"tiers": ["only"], "max_attempts": 1}
        async with running(pools, {"chat": route}) as gateway, calling(gateway.url) as caller:
            status, _, raw = await caller.whole(post(body, *headers, path=path))
    return status, json.loads(raw)["error"]


@pytest.mark.parametrize("stream", [True, False])
async def test_which_limit_is_reached_is_told(stream: bool) -> None:
    """Not whose it is, nor where."""
    script = error("429 Too Many Requests", RPM, type="requests", code="rate_limit_exceeded")
    status, said = await told(script, body={**CHAT, "stream": stream})
    assert (status, said["code"]) == (429, "rate_limit_exceeded")
    assert said["message"].startswith(
        "The backend's rate limit is reached: Rate limit reached for gpt-4o in organization"
    )
    assert "(RPM): Limit 500, Used 500, Requested 1. Please try again in 120ms." in said["message"]
    assert "AbCd" not in said["message"]
    assert "openai.com" not in said["message"]


async def test_in_anthropics_dialect_too() -> None:
    """With the status that its clients know."""
    status, said = await told(
        error("503 Service Unavailable", "The model is being loaded, 40% done"),
        path="/v1/messages",
        body={**CHAT, "max_tokens": 9},
    )
    assert (status, said["type"]) == (529, "overloaded_error")
    assert "The model is being loaded, 40% done" in said["message"]


@pytest.mark.parametrize(
    ("message", "kept", "hidden"),
    [
        (
            "CUDA out of memory on worker 3 at /opt/vllm/worker/model_runner.py",
            "CUDA out of memory on worker 3",
            "vllm",
        ),
        ("Cannot connect to host vllm-7:8000 (10.0.3.4)", "Cannot connect to host", "vllm-7"),
        ("dial tcp: lookup engine-3.ml-team on 10.96.0.10:53: no such host", "no such host", "ml-team"),
        ("upstream ip-10-0-3-4 of pod llama-7d9f8c6b5-x2x4z is gone", "is gone", "7d9f8c6b5"),
        ("account_id: 123456789012 has no capacity left", "has no capacity left", "123456789012"),
        ("arn:aws:bedrock:eu-west-1:123456789012:endpoint/x is throttled", "is throttled", "123456789012"),
        ("ask admin@corp.example.com about this failure", "about this failure", "admin"),
        ("key sk-proj-abc123def456ghi has no quota left here", "has no quota left here", "abc123"),
        ("It broke.\nTraceback (most recent call last):\n  File secret.py, line 3", "It broke.", "secret"),
        ("no route to [fd00::17]:8000 or fd00:0:0:1::17 today", "today", "fd00"),
        ("the backend says: " + "very long words " * 200, "very long words", "x" * 10),
    ],
)
async def test_no_address_account_key_or_path_is_told(message: str, kept: str, hidden: str) -> None:
    """Of whatever length: what follows a few hundred characters helps nobody."""
    _, said = await told(error("500 Internal Server Error", message))
    assert kept in said["message"]
    assert hidden not in said["message"]
    assert len(said["message"]) < 600


@pytest.mark.parametrize("limit", ["TPM:30000, RPM:500", "limit:10000 used:10000 per minute", "Limit 500, Used 500"])
async def test_a_limit_is_no_host_and_port(limit: str) -> None:
    _, said = await told(error("429 Too Many Requests", f"You are over the limit: {limit}"))
    assert limit in said["message"]


async def test_what_is_left_of_the_gateways_money_is_not_told() -> None:
    """That it is used up is."""
    words = "You exceeded your current quota, $12.50 of $10.00 are used; check your plan"
    _, said = await told(error("429 Too Many Requests", words, code="insufficient_quota"))
    assert "exceeded your current quota" in said["message"]
    assert not {"12.50", "10.00"} & {*said["message"].replace("$", " ").split()}


@pytest.mark.parametrize(
    ("status", "message", "more", "expected"),
    [
        (
            "403 Forbidden",
            "Country, region, or territory not supported",
            {"code": "unsupported_country_region_territory"},
            (403, "unsupported_country_region_territory"),
        ),
        (
            "400 Bad Request",
            "User location is not supported for the API use.",
            {"status": "FAILED_PRECONDITION"},
            (403, "unsupported_country_region_territory"),
        ),
        ("403 Forbidden", "Your organization does not have permission", {}, (403, "permission_denied")),
        ("400 Bad Request", "This organization has been restricted.", {}, (403, "permission_denied")),
        ("403 Forbidden", "The API key is disabled", {}, (403, "invalid_api_key")),
        ("401 Unauthorized", "Incorrect API key provided: sk-ab***yz", {}, (401, "invalid_api_key")),
        ("401 Unauthorized", "", {}, (401, "invalid_api_key")),
    ],
)
async def test_a_refusal_of_the_callers_own_key_says_what_is_refused(
    status: str, message: str, more: dict[str, Any], expected: tuple[int, str]
) -> None:
    """A key that is right is not called wrong."""
    found, said = await told(
        error(status, message, **more),
        "authorization: Bearer sk-own-key-123456",
        api_key="caller",
        backend="openai",
        base_url=None,
    )
    assert (found, said["code"]) == expected
    assert ("refuses your API key" in said["message"]) == (expected[1] == "invalid_api_key")
    assert message.partition(":")[0].rstrip(".") in said["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reply_that_is_not_compressed_as_it_says_is_not_called_large(stream: bool) -> None:
    plain = b'{"choices":[{"message":{"content":"hi"}}]}'
    coded = ["content-type: text/event-stream" if stream else JSON, "content-encoding: gzip"]
    _, said = await told([reply(plain, "200 OK", *coded)], body={**CHAT, "stream": stream})
    assert said["message"] == "The backend's reply is not compressed as its header says."


async def test_of_an_error_that_is_not_compressed_as_it_says_the_status_tells() -> None:
    status, said = await told([reply(b"oops", "429 Too Many Requests", "content-encoding: gzip")])
    assert (status, said["message"]) == (429, "The backend's rate limit is reached.")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["text/html; charset=utf-8", "text/plain", "application/json", "text/event-stream"])
async def test_a_web_page_is_a_failure_that_nobody_pays_for(stream: bool, kind: str) -> None:
    """Of a captive portal or a proxy, with status 200 and under any content type."""
    page = b"\n <!DOCTYPE html><html><body>Please log in</body></html>"
    script: Script = [reply(page, "200 OK", f"content-type: {kind}")]
    async with Upstream(script) as server:
        pools = {"only": pool(server.url, price=PRICE)}
        async with running(pools, {"chat": {"tiers": ["only"], "max_attempts": 1}}) as gateway:
            async with calling(gateway.url) as caller:
                status, _, raw = await caller.whole(post({**CHAT, "stream": stream}))
            await eventually(lambda: gateway.recorder.recent)
            record = last(gateway)
    assert (status, json.loads(raw)["error"]["message"]) == (502, "The backend sent a web page in place of an answer.")
    assert [(each.ending, each.tokens, each.cost_usd) for each in record.attempts] == [(AttemptOutcome.FAILED, 0, 0.0)]
    assert record.attempts[0].cause == "200 with a web page"


async def test_a_stream_that_began_is_not_taken_for_a_page() -> None:
    """Whatever the text."""
    said = TOKEN.replace(b'"hi"', b'"<!DOCTYPE html>"')
    script = [STREAM_HEAD + chunk(said + FINISH + DONE) + LAST_CHUNK]
    async with conversing(script) as (_, caller, _):
        status, _ = await caller.ask(post({**CHAT, "stream": True}))
        assert (status, b"<!DOCTYPE html>" in b"".join(await caller.chunks())) == (200, True)


async def test_the_log_names_outcomes_by_their_words(caplog: pytest.LogCaptureFixture) -> None:
    """Of a probe by the gateway, asked for a second witness."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with conversing(error("500 Internal Server Error", "no")) as (_, caller, _):
        for _ in range(6):
            await caller.whole(post(CHAT))
        await eventually(lambda: "asked by the gateway" in caplog.text)
    assert "AttemptOutcome" not in caplog.text
