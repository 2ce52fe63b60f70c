"""Servers whose streams differ from the dialect's, each in one way, and whose whole answers are all well."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Received, Script, Upstream, chunk, reply

Json = dict[str, Any]
JSON = "content-type: application/json"
WORDS = ("one", " two", " three", " four")
TEXT = "".join(WORDS)
ARGUMENTS = '{"city": "Paris", "days": 3}'
USAGE: Json = {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}
HEAD: Json = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def event(*choices: Json, **more: Any) -> Json:
    return {**HEAD, "choices": list(choices), **more}


def delta(value: Json, finish: str | None = None, **more: Any) -> Json:
    return {"index": 0, "delta": value, "logprobs": None, "finish_reason": finish, **more}


def texts(make: Callable[[str, int], Json] = lambda word, _: {"content": word}) -> list[Json]:
    return [event(delta(make(word, number))) for number, word in enumerate(WORDS)]


CUT = b"cut"  # no [DONE] follows
START, STOP, COUNTS = event(delta({"role": "assistant", "content": ""})), event(delta({}, "stop")), event(usage=USAGE)


def text(*middle: Json) -> list[Json]:
    return [START, *middle, STOP, COUNTS]


def _part(index: int | None, **of: Any) -> Json:
    function = {name: of.pop(name) for name in ("name", "arguments") if name in of}
    return event(delta({"tool_calls": [({} if index is None else {"index": index}) | of | {"function": function}]}))


def _call(*parts: Json) -> list[Json]:
    return [event(delta({"role": "assistant", "content": None})), *parts, event(delta({}, "tool_calls")), COUNTS]


CALL: Json = {"id": "call_1", "type": "function", "name": "weather"}
HALF, REST = ARGUMENTS[:9], ARGUMENTS[9:]


def _numbered(events: list[Json], name: str) -> list[Json]:
    """A member of the body with another value in each event."""
    return [{**each, name: f"{name}-{number}"} for number, each in enumerate(events)]


def _without(events: list[Json], name: str) -> list[Json]:
    return [{key: value for key, value in each.items() if key != name} for each in events]


STREAMS: dict[str, list[Json | bytes]] = {
    "well": [*text(*texts())],
    "no usage": [*text(*texts())[:-1]],
    "half a usage": [*text(*texts())[:-1], event(usage={"completion_tokens": 10})],
    "two ids": [*_numbered(text(*texts()), "id")],
    "two models": [*_numbered(text(*texts()), "model")],
    "no id": [*_without(text(*texts()), "id")],
    "no time": [*_without(text(*texts()), "created")],
    "parts": [*text(*texts(lambda word, _: {"content": [{"type": "text", "text": word}]}))],
    "unknown member of the body": [*_numbered(text(*texts()), "provider")],
    "unknown member of a choice": [*text(*(event(delta({"content": each}, score=each)) for each in WORDS))],
    "unknown member of a delta": [*text(*texts(lambda word, n: {"content": word, "note": n}))],
    "a role in each": [*text(*texts(lambda word, n: {"content": word, "role": "assistant" if n else "bot"}))],
    "junk": [START, *texts(), b"OK", STOP, COUNTS],
    "call without an index": [*_call(_part(None, **CALL, arguments=HALF), _part(None, arguments=REST))],
    "call with two ids": [*_call(_part(0, **CALL, arguments=HALF), _part(0, id="call_2", arguments=REST))],
    "call with a repeated name": [*_call(_part(0, **CALL, arguments=HALF), _part(0, name="weather", arguments=REST))],
    "call with an unknown member": [
        *_call(_part(0, **CALL, note=1, arguments=HALF), _part(0, note=2, arguments=REST)),
    ],
    # of which nobody knows the words
    "a choice too many": [START, event({**delta({"content": "x"}), "index": 7}), *texts(), STOP, COUNTS],
    "messages for deltas": [
        *({**event(), "choices": [{"index": 0, "message": {"content": word}}]} for word in WORDS),
        {**event(), "choices": [{"index": 0, "message": {}, "finish_reason": "stop"}]},
        COUNTS,
    ],
    "texts beside the deltas": [*(event(delta({}, text=word)) for word in WORDS), STOP, COUNTS],
    "numbers for a content": [START, event(delta({"content": 5})), *texts(), STOP, COUNTS],
    "no end": [START, *texts(), COUNTS],
    "no end at all": [START, *texts(), CUT],
    "nothing": [START, CUT],
    "junk at first": [b"OK", START, *texts(), STOP, COUNTS],
    "junk with a text": [START, *texts(), b'{"choices": [{"delta": {"content": "x"', STOP, COUNTS],
    "call told twice": [*_call(*[_part(0, **CALL, arguments=ARGUMENTS)] * 2)],
    "call with all arguments so far": [*_call(_part(0, **CALL, arguments=HALF), _part(0, **CALL, arguments=ARGUMENTS))],
    "calls mixed": [
        *_call(_part(None, **CALL, arguments=HALF), _part(None, **{**CALL, "id": "call_2"}, arguments=REST))
    ],
}
TAKEN = tuple(STREAMS)[:17]  # the first answer is used
CALLS = tuple(name for name in STREAMS if name.startswith("call"))


def whole(kind: str) -> Json:
    message: Json = {"role": "assistant", "content": TEXT}
    if kind in CALLS:
        function = {"name": "weather", "arguments": ARGUMENTS}
        message |= {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if kind in CALLS else "stop"}
    return {**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}


def written(events: Sequence[Json | bytes]) -> bytes:
    data = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in events]
    data = data[:-1] if data[-1] == CUT else [*data, b"[DONE]"]
    return b"".join(b"data: %b\n\n" % each for each in data)


class OddServer(Upstream):
    """Answers in the way `kind`. `asked`: for streams (True) and whole answers (False). `whole_fails`: the latter."""

    def __init__(self, kind: str, *, whole_fails: bool = False) -> None:
        super().__init__()
        self.kind, self.whole_fails = kind, whole_fails
        self.asked = Counter[bool]()

    def script(self, received: Received) -> Script:
        if received.method == "GET":
            return [reply(b"{}", "404 Not Found")]
        stream = bool(json.loads(received.body).get("stream"))
        self.asked[stream] += 1
        if stream:
            return [STREAM_HEAD + chunk(written(STREAMS[self.kind])) + LAST_CHUNK]
        if self.whole_fails:
            return [reply(b'{"error": {"message": "no"}}', "500 Internal Server Error", JSON)]
        return [reply(json.dumps(whole(self.kind)).encode(), "200 OK", JSON)]
