"""Events with invalid JSON end in an explicit error, and never reach an SDK's parser."""

from __future__ import annotations

from collections.abc import Sequence

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from gateway.observe.record import Record, RequestOutcome
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, HANG, LAST_CHUNK, RESET, STREAM_HEAD, Step, Upstream, chunk

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
BOTH = TOKEN + TOKEN
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]

JUNK = {
    "broken JSON": b"data: {not json\n\n",
    "cut JSON": b'data: {"choices":[{"index":0,"delta":{"content":"h\n\n',
    "text": b"data: Internal Server Error\n\n",
    "a number": b"data: 42\n\n",
    "nothing": b"data:\n\n",
    "a named error of broken JSON": b'event: error\ndata: {"error": {"mess\n\n',
    "broken JSON of an error": b'data: {"error": {"message": "boom\n\n',
    "invalid UTF-8": TOKEN.replace(b"hi", b"\xff\xfe"),
    "an invalid escape": TOKEN.replace(b"hi", b"\\q"),
    "a quote that is none": TOKEN.replace(b"hi", b"hi\\"),
    "a control character": TOKEN.replace(b"hi", b"h\x00i"),
    "an event in the content": TOKEN.replace(b"hi", b"hi\n\ndata: junk"),
}


async def read(*steps: Step, usage: bool) -> tuple[list[str], str, Record]:
    """The texts and the error read by OpenAI's SDK, and the Record."""
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
        except openai.APIError as raised:
            error = raised.message
        await eventually(lambda: gateway.recorder.recent)
        return texts, error, gateway.recorder.recent[-1]


def torn(data: bytes) -> Sequence[Step]:
    """Two reads, cut in the middle of the last event."""
    middle = len(BOTH) + (len(data) - len(BOTH)) // 2
    return chunk(data[:middle]), chunk(data[middle:])


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("way", ["own read", "same read", "torn", "known form"])
@pytest.mark.parametrize("name", JUNK)
async def test_junk_ends_the_stream_by_an_error_event(name: str, way: str, usage: bool) -> None:
    """All text before is delivered, for any split of the bytes; nothing after."""
    junk = JUNK[name]
    steps: dict[str, Sequence[Step]] = {
        "own read": [chunk(BOTH), chunk(junk)],
        "same read": [chunk(BOTH + junk)],
        "torn": torn(BOTH + junk),
        "known form": [chunk(TOKEN), chunk(TOKEN), chunk(junk)],
    }
    texts, error, record = await read(*steps[way], chunk(TOKEN + FINISH + DONE), LAST_CHUNK, usage=usage)
    assert texts == ["hi", "hi"]
    assert error == ("The backend failed." if "named error" in name else "The backend sent something that is not JSON.")
    assert record.end is RequestOutcome.UPSTREAM_BROKE


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("end", [CLOSE, RESET, HANG])
async def test_an_error_event_follows_whole_events_only(end: Step, usage: bool) -> None:
    """Half an event is not passed on."""
    texts, error, record = await read(chunk(BOTH + TOKEN[:40]), end, usage=usage)
    assert texts == ["hi", "hi"]
    assert error.startswith("The backend ")
    assert record.end is RequestOutcome.UPSTREAM_BROKE


@pytest.mark.parametrize("junk", [*JUNK.values(), TOKEN[:40]], ids=[*JUNK, "half an event"])
async def test_junk_after_the_answer_is_dropped(junk: bytes) -> None:
    """The answer is complete."""
    texts, error, record = await read(chunk(BOTH + FINISH + junk), LAST_CHUNK, usage=True)
    assert (texts, error, record.end) == (["hi", "hi"], "", RequestOutcome.COMPLETED)


async def test_junk_before_the_first_token_falls_back() -> None:
    """No byte has reached the caller yet."""
    texts, error, record = await read(chunk(JUNK["broken JSON"]), LAST_CHUNK, usage=False)
    assert (texts, record.end) == ([], RequestOutcome.FAILED)
    assert "not JSON" in error
