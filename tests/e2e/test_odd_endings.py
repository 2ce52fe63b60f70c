"""Answers that end in odd ways: what the caller reads, and what the Record says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.observe.record import Record, RequestOutcome
from tests.gateway.builders import CHAT, calling, post
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, HANG, LAST_CHUNK, RESET, STREAM_HEAD, Script, Upstream, chunk, reply

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"CANARY engine died","type":"InternalServerError","code":500}}\n\n'


async def told(script: Script, *, stream: bool = True, idle: str = "300ms") -> tuple[int, bytes, Record]:
    """Status, de-chunked body and Record of one request."""
    async with Upstream(script) as upstream:
        defaults = {"stream_idle": idle}
        async with running({"only": pool(upstream.url)}, defaults=defaults) as gateway, calling(gateway.url) as caller:
            status, headers = await caller.ask(post({**CHAT, "stream": stream}))
            chunked = "transfer-encoding" in headers
            body = b"".join(await caller.chunks()) if chunked else await caller.body(headers)
            await eventually(lambda: gateway.recorder.recent)
            return status, body, gateway.recorder.recent[-1]


@pytest.mark.parametrize("end", [CLOSE, RESET, HANG])
async def test_what_follows_done_cannot_turn_success_into_failure(end: Any) -> None:
    """A connection that breaks or stays open behind [DONE] has nothing more to say."""
    status, body, record = await told([STREAM_HEAD + chunk(TOKEN + FINISH + DONE), end])
    assert (status, body, record.end) == (200, TOKEN + FINISH + DONE, RequestOutcome.COMPLETED)


async def test_a_token_and_an_error_in_one_read_are_one_token_and_one_error() -> None:
    """No [DONE] behind it, and no second error event; the backend's own words are not kept."""
    _, body, record = await told([STREAM_HEAD + chunk(TOKEN + ERROR + DONE) + LAST_CHUNK])
    assert (body, record.end) == (TOKEN + ERROR, RequestOutcome.UPSTREAM_BROKE)
    assert "CANARY" not in json.dumps(record.as_json())


async def test_garbage_in_a_stream_is_followed_by_an_error_event_of_ours() -> None:
    """The backend has said nothing that a caller could understand as an error."""
    garbage = b"data: {not json\n\n"
    _, body, record = await told([STREAM_HEAD + chunk(TOKEN), chunk(garbage + TOKEN + DONE) + LAST_CHUNK])
    assert body.startswith(TOKEN + garbage)
    assert b'data: {"error":' in body
    assert DONE not in body
    assert record.end is RequestOutcome.UPSTREAM_BROKE


async def test_a_redirect_is_never_followed_and_never_an_answer() -> None:
    """Wherever it points: it is the backend's failure."""
    elsewhere = reply(b"<html>", "301 Moved Permanently", "location: http://10.0.0.1/")
    status, body, record = await told([elsewhere], stream=False)
    assert status >= 500
    assert b"html" not in body
    assert (record.end, len(record.attempts)) == (RequestOutcome.FAILED, 2)


async def test_a_whole_answer_that_is_an_error_is_not_a_success() -> None:
    """It is the caller's to read, and the Record's to tell."""
    said = json.dumps({"error": {"message": "CANARY", "type": "server_error"}}).encode()
    status, body, record = await told([reply(said, "200 OK", "content-type: application/json")], stream=False)
    assert (status, body, record.end) == (200, said, RequestOutcome.UPSTREAM_BROKE)
    assert "CANARY" not in json.dumps(record.as_json())


async def test_a_lone_surrogate_in_a_backends_error_reaches_nobody() -> None:
    """It could not be encoded again: not to the caller, and not in the Record."""
    said = b'{"error":{"message":"bad \\ud800 value","type":"BadRequestError","code":400}}'
    status, body, record = await told([reply(said, "400 Bad Request", "content-type: application/json")], stream=False)
    assert (status, record.end) == (400, RequestOutcome.REFUSED)
    assert json.loads(body)["error"]["message"]
    json.dumps(record.as_json()).encode()


async def test_a_backends_words_about_a_prompt_are_the_callers_alone() -> None:
    """They come back in the answer; the Record holds only what kind of error it was."""
    said = b'{"error":{"message":"CANARY is not allowed","type":"BadRequestError","code":400}}'
    _, body, record = await told([reply(said, "400 Bad Request", "content-type: application/json")], stream=False)
    assert b"CANARY" in body
    assert "CANARY" not in json.dumps(record.as_json())
