"""Events with invalid JSON never reach an SDK's parser: they are dropped, or end in an explicit error."""

from __future__ import annotations

from collections.abc import Sequence

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from gateway.observe.record import Record, RequestOutcome
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, HANG, LAST_CHUNK, RESET, STREAM_HEAD, Step, Upstream, chunk

pytestmark = pytest.mark.virtual_time

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
BOTH = TOKEN + TOKEN
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":9}}\n\n'

# No part of an answer.
FOREIGN = {
    "text": b"data: Internal Server Error\n\n",
    "a number": b"data: 42\n\n",
    "nothing": b"data:\n\n",
}
# Perhaps a token.
DOUBTFUL = {
    "broken JSON": b"data: {not json\n\n",
    "cut before the text": b'data: {"choices":[{"index":0,"delta":{"content": \n\n',
    "usage in Latin-1": b'data: {"choices":[],"usage":{"completion_tokens":3,"price":"\xa3"}}\n\n',
    "cut before the delta": b'data: {"choices": [{"index": 0, "del\n\n',
}
# A token, or an error.
JUNK = {
    "cut JSON": b'data: {"choices":[{"index":0,"delta":{"content":"h\n\n',
    "a named error of broken JSON": b'event: error\ndata: {"error": {"mess\n\n',
    "broken JSON of an error": b'data: {"error": {"message": "boom\n\n',
    "invalid UTF-8": TOKEN.replace(b"hi", b"\xff\xfe"),
    "an invalid escape": TOKEN.replace(b"hi", b"\\q"),
    "a quote that is none": TOKEN.replace(b"hi", b"hi\\"),
    "a control character": TOKEN.replace(b"hi", b"h\x00i"),
    "an event in the content": TOKEN.replace(b"hi", b"hi\n\ndata: junk"),
}


async def read(*steps: Step, usage: bool, counted: list[float | None] | None = None) -> tuple[list[str], str, Record]:
    """The texts and the error read by OpenAI's SDK, and the Record. The last text is `.` for a finish_reason."""
    texts, error = [], ""
    async with (
        Upstream([STREAM_HEAD, *steps]) as upstream,
        running({"only": pool(upstream.url)}, defaults={"stream_idle": "300ms"}) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        options = {"include_usage": usage}
        try:
            stream = await client.chat.completions.create(
                model="chat",
                messages=HELLO,
                stream=True,
                stream_options=options,  # type: ignore[call-overload]
            )
            async for event in stream:
                texts += [choice.delta.content for choice in event.choices if choice.delta.content]
                texts += ["." for choice in event.choices if choice.finish_reason]
        except openai.APIError as raised:
            error = raised.message
        await eventually(lambda: gateway.recorder.recent)
        if counted is not None:
            counted.append(gateway.registry.get_sample_value("firsttoken_junk_events_total", {"pool": "only"}))
        return texts, error, gateway.recorder.recent[-1]


def torn(data: bytes) -> Sequence[Step]:
    """Two reads, cut in the middle of the last event."""
    middle = len(BOTH) + (len(data) - len(BOTH)) // 2
    return chunk(data[:middle]), chunk(data[middle:])


WAYS = ["own read", "same read", "torn", "known form"]


def ways(junk: bytes, way: str) -> Sequence[Step]:
    """Two tokens and junk."""
    steps: dict[str, Sequence[Step]] = {
        "own read": [chunk(BOTH), chunk(junk)],
        "same read": [chunk(BOTH + junk)],
        "torn": torn(BOTH + junk),
        "known form": [chunk(TOKEN), chunk(TOKEN), chunk(junk)],
    }
    return steps[way]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", JUNK)
async def test_junk_ends_the_stream_by_an_error_event(name: str, way: str, usage: bool) -> None:
    """All text before is delivered, for any split of the bytes; nothing after."""
    texts, error, record = await read(*ways(JUNK[name], way), chunk(TOKEN + FINISH + DONE), LAST_CHUNK, usage=usage)
    assert texts == ["hi", "hi"]
    assert error == ("The backend failed." if "named error" in name else "The backend sent something that is not JSON.")
    assert record.end is RequestOutcome.UPSTREAM_BROKE


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*FOREIGN, *DOUBTFUL])
async def test_junk_is_dropped_where_no_text_is_lost(name: str, way: str, usage: bool) -> None:
    """Of junk that may have been a token, the engine's own count of tokens says so."""
    junk, counted = {**FOREIGN, **DOUBTFUL}[name], list[float | None]()
    for rest in (
        [chunk(TOKEN + FINISH + USAGE % 3 + DONE)],
        [chunk(each) for each in (TOKEN, FINISH, USAGE % 3, DONE)],
    ):
        texts, error, record = await read(*ways(junk, way), *rest, LAST_CHUNK, usage=usage, counted=counted)
        assert (texts, error, record.end) == (["hi", "hi", "hi", "."], "", RequestOutcome.COMPLETED)
        assert record.answer.output_tokens == 3
    assert counted == [1.0, 1.0]


@pytest.mark.parametrize(
    "end", [USAGE % 4 + DONE, USAGE % 4, DONE, b""], ids=["counted", "no DONE", "no usage", "none"]
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DOUBTFUL)
async def test_junk_in_the_place_of_a_token_is_an_explicit_error(name: str, way: str, end: bytes) -> None:
    """The engine has counted more tokens than have arrived, or says nothing. No finish_reason is relayed."""
    for rest in ([chunk(TOKEN + FINISH + end)], [chunk(each) for each in (TOKEN, FINISH, end) if each]):
        texts, error, record = await read(*ways(DOUBTFUL[name], way), *rest, LAST_CHUNK, usage=True)
        assert texts == ["hi", "hi", "hi"]
        assert "text may be missing" in error
        assert record.end is RequestOutcome.UPSTREAM_BROKE


async def test_a_stream_of_junk_is_an_explicit_error() -> None:
    """However harmless each of the events is."""
    junk = FOREIGN["text"]
    texts, error, record = await read(chunk(TOKEN + junk * 8 + TOKEN), chunk(junk), HANG, usage=True)
    assert (texts, record.end) == (["hi", "hi"], RequestOutcome.UPSTREAM_BROKE)
    assert "not JSON" in error


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("end", [CLOSE, RESET, HANG])
async def test_an_error_event_follows_whole_events_only(end: Step, usage: bool) -> None:
    """Half an event is not passed on."""
    texts, error, record = await read(chunk(BOTH + TOKEN[:40]), end, usage=usage)
    assert texts == ["hi", "hi"]
    assert error.startswith("The backend ")
    assert record.end is RequestOutcome.UPSTREAM_BROKE


ALL = {**FOREIGN, **DOUBTFUL, **JUNK, "half an event": TOKEN[:40]}


@pytest.mark.parametrize("junk", ALL.values(), ids=ALL)
async def test_junk_after_the_answer_is_dropped(junk: bytes) -> None:
    """The answer is complete."""
    texts, error, record = await read(chunk(BOTH + FINISH + junk), LAST_CHUNK, usage=True)
    assert (texts, error, record.end) == (["hi", "hi", "."], "", RequestOutcome.COMPLETED)


async def test_junk_before_the_first_token_falls_back() -> None:
    """No byte has reached the caller yet."""
    texts, error, record = await read(chunk(DOUBTFUL["broken JSON"]), LAST_CHUNK, usage=False)
    assert (texts, record.end) == ([], RequestOutcome.FAILED)
    assert "not JSON" in error
