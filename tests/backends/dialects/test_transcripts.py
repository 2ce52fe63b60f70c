"""Every kind of backend against a server of its documented shapes: requests, streams, usage, errors and limits."""

from __future__ import annotations

import json

import pytest

from backends import rate_limit_headers
from backends.catalog import KINDS
from backends.interface import HttpCall
from tests.backends.dialects.transcript import Transcript, exchanged, refused, request, streamed, transcripts

TRANSCRIPTS = transcripts()
# Recorded from real servers, and tested by tests/backends/test_vllm.py; or another name for one of those here.
ELSEWHERE = {"vllm", "simulated", "openai-compatible", "compatible", "anthropic"}

every_kind = pytest.mark.parametrize("transcript", TRANSCRIPTS.values(), ids=TRANSCRIPTS)


def test_every_kind_has_a_transcript() -> None:
    assert set(KINDS) - set(TRANSCRIPTS) <= ELSEWHERE


@every_kind
async def test_a_request_reaches_the_server_in_its_dialect(transcript: Transcript) -> None:
    call = transcript.backend().call(request())
    _, upstream = await exchanged(transcript, call, streamed(transcript.stream, {}))
    [received] = upstream.requests
    assert (received.method, received.target) == ("POST", transcript.target)
    assert {name: received.headers.get(name) for name in transcript.headers} == transcript.headers
    body = json.loads(received.body)
    assert {name: body.get(name) for name in transcript.body} == transcript.body
    assert not set(transcript.absent) & set(body)


@every_kind
async def test_a_stream_is_read_to_its_end(transcript: Transcript) -> None:
    """In pieces of 40 bytes: comments, reasoning, filters, and usage where the provider puts it."""
    backend = transcript.backend()
    tap = backend.tap(request())
    listener, _ = await exchanged(transcript, backend.call(request()), streamed(transcript.stream, transcript.limits))
    for read in listener.reads:
        tap.feed(read)
    tap.close()
    assert (tap.tokens, tap.usage, tap.ended, tap.failure) == (transcript.tokens, transcript.usage, True, None)
    assert not tap.spoiled
    found = [
        (one.counts_tokens, one.remaining, one.limit, one.reset) for one in rate_limit_headers.read(listener.headers)
    ]
    assert found == [pytest.approx(wait) for wait in transcript.waits]


@pytest.mark.parametrize(
    ("transcript", "number"),
    [(one, number) for one in TRANSCRIPTS.values() for number in range(len(one.errors))],
    ids=lambda value: value.kind if isinstance(value, Transcript) else str(value),
)
async def test_an_error_has_its_meaning(transcript: Transcript, number: int) -> None:
    """No key, host or account of the provider is shown to a caller."""
    error, backend = transcript.errors[number], transcript.backend()
    listener, _ = await exchanged(transcript, backend.call(request()), refused(error))
    failure = backend.failure(listener.status, listener.headers, listener.body)
    assert (failure.kind, failure.code) == (error.kind, error.code or failure.code)
    assert failure.retry_after == error.retry_after
    assert not any(secret in failure.message for secret in ("sk-secret", "org-", "http"))


@pytest.mark.parametrize("transcript", [one for one in TRANSCRIPTS.values() if one.stream_error], ids=lambda t: t.kind)
async def test_an_error_inside_a_stream_is_no_answer(transcript: Transcript) -> None:
    backend = transcript.backend()
    tap = backend.tap(request())
    listener, _ = await exchanged(transcript, backend.call(request()), streamed(transcript.stream_error, {}))
    visible = [tap.feed(read) for read in listener.reads]
    assert not any(visible)
    assert tap.failure is not None
    assert tap.failure.kind is transcript.stream_failure


@pytest.mark.parametrize("transcript", [one for one in TRANSCRIPTS.values() if one.load], ids=lambda t: t.kind)
def test_the_load_is_read_from_the_engines_page(transcript: Transcript) -> None:
    assert transcript.load is not None
    path, page, said = transcript.load
    backend = transcript.backend()
    assert backend.load() == HttpCall("GET", path)
    assert {name: value for name, value in backend.read_load(page).items() if value is not None} == said
