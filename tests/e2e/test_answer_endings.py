"""Unusual ends of answers: the bytes received by the caller, and the Record."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.observe.record import Record, RequestOutcome
from gateway.observe.record_columns import RECORD
from gateway.upstream import answer, race
from tests.support.builders import CHAT, WHOLE, calling, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, HANG, LAST_CHUNK, RESET, STREAM_HEAD, Script, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"CANARY engine died","type":"InternalServerError","code":500}}\n\n'


CHUNK = '"id":"1","object":"chat.completion.chunk","created":1,"model":"served"'
WHOLE_STREAM = (
    f'data: {{{CHUNK},"choices":[{{"index":0,"delta":{{"role":"assistant","content":"hi"}}}}]}}\n\n'
    f'data: {{{CHUNK},"choices":[{{"index":0,"delta":{{}},"finish_reason":"stop"}}]}}\n\n'
    f'data: {{{CHUNK},"choices":[],"usage":{{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}}}\n\n'
).encode() + DONE


async def request(script: Script, *, stream: bool = True, idle: str = "300ms") -> tuple[int, bytes, Record]:
    """Status, de-chunked body and Record of a request."""
    async with Upstream(script) as upstream:
        defaults = {"stream_idle": idle}
        async with running({"only": pool(upstream.url)}, defaults=defaults) as gateway, calling(gateway.url) as caller:
            status, headers = await caller.ask(post({**CHAT, "stream": stream}))
            chunked = "transfer-encoding" in headers
            body = b"".join(await caller.chunks()) if chunked else await caller.body(headers)
            await eventually(lambda: gateway.recorder.recent)
            return status, body, gateway.recorder.recent[-1]


@pytest.mark.parametrize("end", [CLOSE, RESET, HANG])
async def test_a_broken_connection_after_done_is_no_failure(end: Any) -> None:
    """A connection that breaks or stays open after [DONE] carries no further data."""
    status, body, record = await request([STREAM_HEAD + chunk(TOKEN + FINISH + DONE), end])
    assert (status, body, record.end) == (200, TOKEN + FINISH + DONE, RequestOutcome.COMPLETED)


@pytest.mark.parametrize("end", [LAST_CHUNK, CLOSE, RESET, HANG])
@pytest.mark.parametrize("held", [b"", b'data: {"choices": [], "usa'], ids=["", "within the usage"])
async def test_an_engine_that_dies_after_the_finish_reason_leaves_a_whole_answer(end: Any, held: bytes) -> None:
    """With [DONE], which some clients wait for."""
    for read in ([chunk(TOKEN + FINISH + held)], [chunk(TOKEN), chunk(FINISH + held)]):
        status, body, record = await request([STREAM_HEAD, *read, end])
        assert (status, body, record.end) == (200, TOKEN + FINISH + DONE, RequestOutcome.COMPLETED)


async def test_a_token_and_an_error_event_in_one_read_are_both_forwarded() -> None:
    """No [DONE] and no second error event follow; the Record tells the operator what the server has said."""
    _, body, record = await request([STREAM_HEAD + chunk(TOKEN + ERROR + DONE) + LAST_CHUNK])
    assert (body, record.end) == (TOKEN + ERROR, RequestOutcome.UPSTREAM_BROKE)
    assert record.attempts[0].cause.startswith("200 with an error inside: ")
    assert record.attempts[0].cause.endswith(": … engine died")
    assert "CANARY" not in json.dumps(RECORD.view(record))


async def test_an_invalid_event_without_a_count_of_tokens_is_followed_by_an_error_event() -> None:
    """It may have been a token."""
    garbage = b"data: {not json\n\n"
    _, body, record = await request([STREAM_HEAD + chunk(TOKEN), chunk(garbage + TOKEN + DONE) + LAST_CHUNK])
    assert body.startswith(TOKEN + TOKEN + b'data: {"error":')
    assert garbage not in body
    assert DONE not in body
    assert record.end is RequestOutcome.UPSTREAM_BROKE


async def test_a_redirect_is_a_failure_and_never_followed() -> None:
    """For any location: the attempt failed."""
    elsewhere = reply(b"<html>", "301 Moved Permanently", "location: http://10.0.0.1/")
    status, body, record = await request([elsewhere], stream=False)
    assert status >= 500
    assert b"html" not in body
    assert (record.end, len(record.attempts)) == (RequestOutcome.FAILED, 2)


async def test_an_unstreamed_error_with_status_200_is_no_success() -> None:
    """No byte has reached the caller, so another attempt is made, and the caller gets an error of the gateway, with the
    server's words but for secrets."""
    said = "CUDA error at 10.0.0.3 with key sk-proj-0123456789abcdef0123"
    error_body = json.dumps({"error": {"message": said, "type": "server_error"}}).encode()
    status, body, record = await request([reply(error_body, "200 OK", "content-type: application/json")], stream=False)
    assert (status, record.end, len(record.attempts)) == (502, RequestOutcome.FAILED, 2)
    assert b"CUDA error" in body
    assert not any(secret in body for secret in (b"10.0.0.3", b"sk-proj"))
    assert all(attempt.cause.startswith("200 with an error inside: ") for attempt in record.attempts)
    assert "sk-proj" not in json.dumps(RECORD.view(record))


async def test_a_lone_surrogate_in_a_backends_error_is_dropped() -> None:
    """A lone surrogate cannot be encoded, neither for the caller nor in the Record."""
    error_body = b'{"error":{"message":"bad \\ud800 value","type":"BadRequestError","code":400}}'
    status, body, record = await request(
        [reply(error_body, "400 Bad Request", "content-type: application/json")], stream=False
    )
    assert (status, record.end) == (400, RequestOutcome.REFUSED)
    assert json.loads(body)["error"]["message"]
    json.dumps(RECORD.view(record)).encode()


async def test_a_backends_error_message_goes_to_its_caller_only() -> None:
    """The answer has the message; the Record holds only the kind of error."""
    error_body = b'{"error":{"message":"CANARY is not allowed","type":"BadRequestError","code":400}}'
    _, body, record = await request(
        [reply(error_body, "400 Bad Request", "content-type: application/json")], stream=False
    )
    assert b"CANARY" in body
    assert "CANARY" not in json.dumps(RECORD.view(record))


def ended(*indices: int) -> bytes:
    """Events that end these choices."""
    return b"".join(
        b'data: {"choices":[{"index":%d,"text":"hi","finish_reason":"stop"}]}\n\n' % index for index in indices
    )


@pytest.mark.parametrize(
    ("asked", "choices"),
    [({"prompt": ["a", "b"]}, 2), ({"prompt": [[1], [2], [3]]}, 3), ({"prompt": ["a", "b"], "n": 2}, 4)],
    ids=["texts", "token lists", "texts, n"],
)
async def test_a_batch_is_complete_when_each_choice_has_ended(asked: dict[str, Any], choices: int) -> None:
    """A choice that ends twice is a single choice; a batch cut before its last choice is a broken answer."""
    most = range(choices - 1)
    for indices, whole in (([*most, 0], False), (range(choices), True)):
        async with (
            Upstream([STREAM_HEAD + chunk(ended(*indices)), CLOSE]) as upstream,
            running({"only": pool(upstream.url)}) as gateway,
            calling(gateway.url) as caller,
        ):
            body = {"model": "chat", "stream": True, **asked}
            await caller.ask(post(body, path="/v1/completions"))
            answer = b"".join(await caller.chunks())
            await eventually(lambda gateway=gateway: gateway.recorder.recent)
            end = gateway.recorder.recent[-1].end
            assert (b'"error"' in answer, end is RequestOutcome.COMPLETED) == (not whole, whole)


@pytest.mark.parametrize("prompt", ["a", [1, 2, 3], ["a"]])
async def test_a_single_prompt_ends_with_one_choice(prompt: Any) -> None:
    """A list of tokens is a single prompt."""
    async with (
        Upstream([STREAM_HEAD + chunk(ended(0)), CLOSE]) as upstream,
        running({"only": pool(upstream.url)}) as gateway,
        calling(gateway.url) as caller,
    ):
        await caller.ask(post({"model": "chat", "stream": True, "prompt": prompt}, path="/v1/completions"))
        await caller.chunks()
        await eventually(lambda: gateway.recorder.recent)
        assert gateway.recorder.recent[-1].end is RequestOutcome.COMPLETED


async def test_an_error_of_the_gateway_in_the_last_step_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error at once: nothing that the request waits for is left to come."""

    def broken(*known: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(race, "whole_reply", broken)
    monkeypatch.setattr(answer, "whole_reply", broken)
    for kind, script in (("vllm", STREAM_HEAD + chunk(WHOLE_STREAM) + LAST_CHUNK), ("compatible", reply(WHOLE))):
        async with Upstream([script]) as upstream:
            pools = {"p": pool(upstream.url, backend=kind)}
            async with running(pools, {"chat": {"tiers": ["p"]}}) as gateway, calling(gateway.url) as caller:
                status, _, _ = await caller.whole(post(CHAT))
                assert (status, last(gateway).end) == (502, RequestOutcome.FAILED)


@pytest.mark.parametrize("kind", ["Text/Event-Stream", "text/event-stream; charset=UTF-8"])
async def test_the_case_of_a_content_type_is_of_no_meaning(kind: str) -> None:
    head = STREAM_HEAD.replace(b"text/event-stream", kind.encode())
    async with Upstream([head + chunk(WHOLE_STREAM) + LAST_CHUNK]) as upstream:
        pools = {"p": pool(upstream.url, backend="vllm")}
        async with running(pools, {"chat": {"tiers": ["p"]}}) as gateway, calling(gateway.url) as caller:
            status, _, _ = await caller.whole(post(CHAT))
            assert (status, len(last(gateway).attempts)) == (200, 1)
