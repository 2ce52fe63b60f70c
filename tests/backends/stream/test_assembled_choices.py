"""The events of a stream, put together, are the answer that the server sends whole."""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.catalog import build
from backends.interface import BackendConfig, BackendRequest, Operation
from backends.stream.assembled_choices import ChoicesAssembler
from backends.stream.assembly import ASSEMBLED_LIMIT, Unassembled
from backends.stream.whole_forms import OPENAI_CHAT, OPENAI_COMPLETION, VLLM_CHAT, VLLM_COMPLETION, WholeForm
from lab.servers.reply import ReplyWriter, SimulatedReply

TRANSCRIPTS = Path(__file__).parents[1] / "transcripts"
ENVELOPE = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
SLOTS = ("id", "created", "time_to_first_token_ms", "generation_time_ms", "queue_time_ms")
SLOTS += ("mean_itl_ms", "tokens_per_second")


def event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def chunk(delta: dict[str, Any], finish: str | None = None, **choice: Any) -> bytes:
    return event({**ENVELOPE, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **choice}]})


END = event({**ENVELOPE, "choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"


def assemble(stream: bytes, form: WholeForm = OPENAI_CHAT, choices: int = 1, cuts: list[int] | None = None) -> Any:
    """The whole answer, its members in their order. `cuts`: where reads end; None: one event each."""
    assembler = ChoicesAssembler(form, choices)
    if cuts is None:
        reads = [read + b"\n\n" for read in stream.split(b"\n\n")[:-1]]
    else:
        reads = [stream[a:b] for a, b in pairwise([0, *sorted(cuts), len(stream)])]
    for read in reads:
        assembler.feed(read)
    return json.loads(assembler.whole())


def message_of(*events: bytes, form: WholeForm = OPENAI_CHAT) -> Any:
    return assemble(b"".join(events) + END, form)["choices"][0]["message"]


# ---------------------------------------------------------------- real servers


def shape(value: Any) -> Any:
    """Names in their order, and all values but those of one run."""
    if isinstance(value, dict):
        return [(name, "*" if name in SLOTS else shape(item)) for name, item in value.items()]
    return [shape(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("stream", "whole", "form"),
    [
        ("vllm_chat_stream.sse", "vllm_chat.json", VLLM_CHAT),
        ("vllm_completion_stream.sse", "vllm_completion.json", VLLM_COMPLETION),
    ],
)
@given(data=st.data())
def test_a_stream_of_vllm_is_its_whole_answer(stream: str, whole: str, form: WholeForm, data: st.DataObject) -> None:
    """Recorded of the same prompt: all members, nulls and their order."""
    body = (TRANSCRIPTS / stream).read_bytes()
    cuts = data.draw(st.none() | st.lists(st.integers(0, len(body)), max_size=8))
    assert shape(assemble(body, form, cuts=cuts)) == shape(json.loads((TRANSCRIPTS / whole).read_bytes()))


@pytest.mark.parametrize(("name", "finish"), [("vllm_chat_tool", "tool_calls"), ("vllm_chat_named_tool", "stop")])
def test_tool_calls_of_vllm_are_joined(name: str, finish: str) -> None:
    """The arguments are the same JSON as in the whole answer, in the model's own spelling."""
    choice = assemble((TRANSCRIPTS / f"{name}_stream.sse").read_bytes(), VLLM_CHAT)["choices"][0]
    whole = json.loads((TRANSCRIPTS / "vllm_chat_tool.json").read_bytes())["choices"][0]
    call, known = choice["message"]["tool_calls"][0], whole["message"]["tool_calls"][0]
    assert list(choice["message"]) == list(whole["message"])
    assert (list(call), list(call["function"])) == (list(known), list(known["function"]))
    assert choice["finish_reason"] == finish
    assert json.loads(call["function"]["arguments"]) == json.loads(known["function"]["arguments"])


@pytest.mark.parametrize("name", ["vllm_engine_died_before_token.sse", "vllm_engine_died_mid_stream.sse"])
def test_a_stream_of_a_dead_engine_is_no_answer(name: str) -> None:
    with pytest.raises(Unassembled, match="error event"):
        assemble((TRANSCRIPTS / name).read_bytes(), VLLM_CHAT)


@pytest.mark.parametrize("chat", [True, False])
@given(st.lists(st.text(min_size=1), min_size=1, max_size=9), st.sampled_from([None, "tool"]), st.data())
def test_a_stream_of_a_simulated_engine_is_its_whole_answer(
    chat: bool, pieces: list[str], tool: str | None, data: st.DataObject
) -> None:
    """In the words of its own writer."""
    tool = tool if chat else None
    pieces = ["", *pieces] if tool else pieces  # the name of a tool is the first token
    reply = SimulatedReply(tuple(pieces), "stop", tool)
    writer = ReplyWriter(reply=reply, id="x", model="m", created=7, chat=chat, vllm=True, usage=True)
    metrics = {"queue_time_ms": 1.5}
    stream = b"".join(writer.tokens(i, i + 1) for i in range(len(pieces))) + writer.ending(USAGE, metrics)
    forward = BackendRequest(Operation.CHAT if chat else Operation.COMPLETION, {}, "m", stream=False)
    assembler = build(BackendConfig("simulated", "m")).assembler(forward)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))
    for start, end in pairwise([0, *sorted(cuts), len(stream)]):
        assembler.feed(stream[start:end])
    assert json.loads(assembler.whole()) == writer.whole(USAGE, metrics)


# ---------------------------------------------------------------- any answer

names = st.text("abc_", min_size=1, max_size=6)
texts = st.text(max_size=12)
calls = st.builds(
    lambda id, name, arguments: {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    names,
    names,
    texts,
)
logprobs = st.none() | st.lists(st.fixed_dictionaries({"token": texts, "logprob": st.integers(-9, 0)}), min_size=1)


@st.composite
def chat_choices(draw: st.DrawFn, index: int) -> dict[str, Any]:
    content = draw(st.none() | texts)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if listed := draw(st.lists(calls, max_size=3)):
        message["tool_calls"] = listed
    message |= {"refusal": draw(st.none() | st.text(min_size=1, max_size=5)), "annotations": []}
    if reasoning := draw(st.none() | st.text(min_size=1, max_size=9)):
        message["reasoning_content"] = reasoning
    if not content and (listed or message["refusal"] or reasoning):
        message["content"] = None  # as servers write it
    scores = draw(logprobs)
    return {
        "index": index,
        "message": message,
        "logprobs": None if scores is None else {"content": scores, "refusal": None},
        "finish_reason": draw(st.sampled_from(["stop", "length", "tool_calls"])),
    }


@st.composite
def chat_answers(draw: st.DrawFn) -> dict[str, Any]:
    listed = [draw(chat_choices(index)) for index in range(draw(st.integers(1, 3)))]
    head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
    return {**head, "choices": listed, "usage": USAGE, "service_tier": "default", "system_fingerprint": "fp"}


def parts(draw: st.DrawFn, value: Any) -> list[Any]:
    """A text or list in up to three parts."""
    ends = sorted(draw(st.lists(st.integers(0, len(value)), max_size=2)))
    return [value[a:b] for a, b in pairwise([0, *ends, len(value)])]


def deltas_of(draw: st.DrawFn, choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Events of a choice. The parts of parallel calls are mixed."""
    message, index = choice["message"], choice["index"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None if message["content"] is None else ""}]
    for name in ("reasoning_content", "content", "refusal"):
        if message.get(name) is not None:
            deltas += [{name: part} for part in parts(draw, message[name])]
    open_calls: list[list[dict[str, Any]]] = []
    for number, call in enumerate(message.get("tool_calls", ())):
        first = {"index": number, **call, "function": {"name": call["function"]["name"], "arguments": ""}}
        rest = parts(draw, call["function"]["arguments"])
        open_calls.append([first, *({"index": number, "function": {"arguments": part}} for part in rest)])
    while open_calls:
        queue = draw(st.sampled_from(open_calls))
        deltas.append({"tool_calls": [queue.pop(0)]})
        open_calls = [queue for queue in open_calls if queue]
    events: list[dict[str, Any]] = [{"index": index, "delta": delta, "logprobs": None} for delta in deltas]
    if choice["logprobs"]:
        scored = [{"content": part, "refusal": None} for part in parts(draw, choice["logprobs"]["content"])]
        events += [{"index": index, "delta": {}, "logprobs": part} for part in scored]
    return [*events, {"index": index, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}]


def stream_of(draw: st.DrawFn, answer: dict[str, Any], kind: str, queues: list[list[dict[str, Any]]]) -> bytes:
    """The answer as a stream; the events of its choices are mixed."""
    head = {name: answer[name] for name in ("id", "created", "model", "system_fingerprint") if name in answer}
    stream = b""
    while queues := [queue for queue in queues if queue]:
        next_choice = draw(st.sampled_from(queues)).pop(0)
        stream += event({**head, "object": kind, "choices": [next_choice], "usage": None, "obfuscation": "x" * 7})
    tier = {"service_tier": answer["service_tier"]} if "service_tier" in answer else {}
    return stream + event({**head, "object": kind, "choices": [], "usage": USAGE, **tier}) + b"data: [DONE]\n\n"


@given(chat_answers(), st.data())
def test_any_chat_is_put_together_again(answer: dict[str, Any], data: st.DataObject) -> None:
    """Several choices, parallel calls in any order of their parts, torn anywhere."""
    queues = [deltas_of(data.draw, choice) for choice in answer["choices"]]
    stream = stream_of(data.draw, answer, "chat.completion.chunk", queues)
    cuts = data.draw(st.none() | st.lists(st.integers(0, len(stream)), max_size=6))
    whole = assemble(stream, choices=len(answer["choices"]), cuts=cuts)
    assert whole == answer
    assert list(whole) == list(answer)


@given(st.lists(texts, min_size=1, max_size=3), st.booleans(), st.data())
def test_any_completion_is_put_together_again(written: list[str], scored: bool, data: st.DataObject) -> None:
    listed = [
        {
            "text": text,
            "index": index,
            "logprobs": {
                "tokens": list(text),
                "token_logprobs": [-1.5] * len(text),
                "top_logprobs": [{char: -1.5} for char in text],
                "text_offset": list(range(len(text))),
            }
            if scored
            else None,
            "finish_reason": "length",
        }
        for index, text in enumerate(written)
    ]
    answer = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": listed, "usage": USAGE}
    queues = []
    for choice in deepcopy(listed):
        ends = sorted(data.draw(st.lists(st.integers(0, len(choice["text"])), max_size=3)))
        spans = list(pairwise([0, *ends, len(choice["text"])]))
        queues.append(
            [
                {
                    "index": choice["index"],
                    "text": choice["text"][a:b],
                    "logprobs": {name: items[a:b] for name, items in choice["logprobs"].items()} if scored else None,
                    "finish_reason": "length" if number == len(spans) else None,
                }
                for number, (a, b) in enumerate(spans, 1)
            ]
        )
    stream = stream_of(data.draw, answer, "text_completion", queues)
    assert assemble(stream, OPENAI_COMPLETION, len(listed)) == answer


# ---------------------------------------------------------------- members


def test_token_ids_are_joined() -> None:
    """As vLLM writes them, with return_token_ids."""
    stream = (
        event({**ENVELOPE, "choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [1, 2]})
        + chunk({"content": "a"}, token_ids=[3])
        + chunk({"content": "b"}, "stop", token_ids=[4, 5], stop_reason=5)
        + END
    )
    whole = assemble(stream, VLLM_CHAT)
    assert whole["prompt_token_ids"] == [1, 2]
    assert (whole["choices"][0]["token_ids"], whole["choices"][0]["stop_reason"]) == ([3, 4, 5], 5)


def test_an_event_with_more_than_a_text_is_always_parsed() -> None:
    """However often it comes in the same form."""
    scored = chunk({"content": "a"}, logprobs={"content": [{"token": "a"}], "refusal": None})
    whole = assemble(scored * 3 + chunk({}, "stop") + END)["choices"][0]
    assert (whole["message"]["content"], len(whole["logprobs"]["content"])) == ("aaa", 3)
    both = chunk({"content": "a", "reasoning": "b"})
    message = message_of(*[both] * 3, chunk({}, "stop"), form=VLLM_CHAT)
    assert (message["content"], message["reasoning"]) == ("aaa", "bbb")


def built(stream: bytes, form: WholeForm = OPENAI_CHAT) -> tuple[ChoicesAssembler, Any]:
    assembler = ChoicesAssembler(form)
    assembler.feed(stream)
    return assembler, json.loads(assembler.whole(lambda: (7, 5)))


def test_a_stream_without_a_member_of_every_answer_tells_so() -> None:
    """A client may miss it, so the next answer is better asked for whole; the words of this one are all there."""
    nameless = (chunk({"content": "a"}, "stop") + END).replace(b'"model": "m"', b'"seed": 1')
    assembler, whole = built(nameless)
    assert (assembler.difference, assembler.of_calls) == ("no 'model'", False)
    assert (whole["choices"][0]["message"]["content"], "model" in whole) == ("a", False)


def test_a_stream_without_usage_is_no_answer() -> None:
    """The event with the usage comes after the finish_reason; other events may have a null there."""
    unfinished = event({**ENVELOPE, "choices": [], "usage": None})
    with pytest.raises(Unassembled):
        assemble(chunk({"content": "a"}, "stop") + unfinished)


@pytest.mark.parametrize("usage", [None, {}, 5, {"prompt_tokens": 3}])
def test_a_count_of_the_gateway_stands_in_for_a_usage_that_no_server_tells(usage: Any) -> None:
    assembler, whole = built(chunk({"content": "a"}, "stop") + event({**ENVELOPE, "choices": [], "usage": usage}))
    counts = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    assert whole["usage"] == {**counts, **(usage if isinstance(usage, dict) else {})}
    assert assembler.difference == "no usage in the stream"
    assert built(chunk({"content": "a"}, "stop") + END)[0].difference == ""


def test_a_content_without_text_is_null_beside_reasoning_and_calls() -> None:
    first = chunk({"role": "assistant", "content": ""})
    assert message_of(first, chunk({"reasoning": "hm"}), chunk({}, "length"), form=VLLM_CHAT)["content"] is None
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert message_of(first, chunk({"tool_calls": [call]}), chunk({}, "stop"))["content"] is None
    assert message_of(first, chunk({}, "stop"))["content"] == ""


def test_a_function_call_is_joined() -> None:
    message = message_of(
        chunk({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}}),
        chunk({"function_call": {"arguments": '{"a"'}}),
        chunk({"function_call": {"arguments": ": 1}"}}),
        chunk({}, "function_call"),
    )
    assert message["function_call"] == {"name": "f", "arguments": '{"a": 1}'}


def test_an_unknown_member_is_kept() -> None:
    whole = assemble(chunk({"mood": "calm"}, "stop", seen=1) + event({**ENVELOPE, "trace": "t", "choices": []}) + END)
    assert (whole["trace"], whole["choices"][0]["seen"], whole["choices"][0]["message"]["mood"]) == ("t", 1, "calm")


@pytest.mark.parametrize(
    "parts_of_answer",
    [
        [chunk({"audio": {"data": "AA"}}), chunk({"audio": {"data": "BB"}}, "stop")],
        [chunk({}, "stop", index=1)],
        [chunk({"content": 5}, "stop")],
        [chunk({"content": ["a"]}, "stop")],
        [b'data: {"choices": 3}\n\n', chunk({"content": "a"}, "stop")],
        [b'data: {"choices": [{"delta": 3}]}\n\n', chunk({"content": "a"}, "stop")],
    ],
)
def test_what_is_not_known_to_be_exact_is_refused(parts_of_answer: list[bytes]) -> None:
    with pytest.raises(Unassembled):
        assemble(b"".join(parts_of_answer) + END)


def calls_of(*parts: bytes) -> tuple[str, list[tuple[Any, ...]]]:
    """Id, name and arguments of each call, and the difference, which is of calls alone."""
    assembler, whole = built(b"".join(parts) + chunk({}, "tool_calls") + END)
    assert assembler.of_calls
    found = whole["choices"][0]["message"]["tool_calls"]
    assert not any("index" in each for each in found)
    named = [(each["id"], each["function"]["name"], each["function"]["arguments"]) for each in found]
    return assembler.difference, named


def part(index: int | None = 0, id: str | None = None, name: str | None = None, args: str = "") -> bytes:
    function = {"arguments": args} if name is None else {"name": name, "arguments": args}
    labels = {"index": index, "id": id, "type": "function" if id else None}
    return chunk({"tool_calls": [{k: v for k, v in labels.items() if v is not None} | {"function": function}]})


F, G = ("a", "f", '{"x": 1}'), ("b", "g", "{}")


@pytest.mark.parametrize(
    ("parts_of_calls", "calls"),
    [
        ([part(None, "a", "f", '{"x"'), part(None, args=": 1}")], [F]),
        ([part(None, "a", "f", '{"x"'), part(None, "a", args=": 1}"), part(None, "b", "g", "{}")], [F, G]),
        ([part(None, "a", "f", '{"x": 1}'), part(None, "b", "g", "{}")], [F, G]),
        ([part(0, "a", "f", '{"x": 1}'), part(0, "b", "g", "{}")], [F, G]),
        ([part(0, "a", "f", '{"x": 1}'), part(0, "b", "f", "{}")], [F, ("b", "f", "{}")]),
        ([part(0, "a", "f"), part(0, args='{"x": 1}'), part(0, "b", "g"), part(0, args="{}")], [F, G]),
        ([part(0, "a", "f", '{"x"'), part(0, "z", args=": 1}")], [F]),
        ([part(0, "a", "f", '{"x"'), part(0, "z", "f", args=": 1}")], [F]),
        ([part(0, "a", "f"), part(0, "z", "f", '{"x"'), part(0, "y", "f", ": 1}")], [F]),
        ([part(0, "a", "f", '{"x"'), part(0, name="f", args=": 1}")], [F]),
        ([part(0, "a", "get_"), part(0, name="time", args="{}")], [("a", "get_time", "{}")]),
    ],
)
def test_calls_are_put_together_however_their_parts_are_labelled(
    parts_of_calls: list[bytes], calls: list[tuple[str, str, str]]
) -> None:
    """No index, one index for all, an id that changes, a name in each part."""
    difference, found = calls_of(*parts_of_calls)
    assert found == calls
    assert difference


def test_calls_that_cannot_be_told_apart_are_no_answer() -> None:
    """A guess that leaves arguments that are no JSON was wrong."""
    odd = part(None, "a", "f", '{"x"') + part(None, "b", "g", "{}") + chunk({}, "tool_calls") + END
    with pytest.raises(Unassembled, match="told apart") as refused:
        assemble(odd)
    assert refused.value.of_calls


@pytest.mark.parametrize(
    ("parts_of_answer", "message"),
    [
        ([chunk({"mood": "calm"}), chunk({"mood": "calm"}, "stop")], {"mood": "calm"}),
        ([chunk({"aside": "a"}), chunk({"aside": "b"}, "stop")], {"aside": "ab"}),
        ([chunk({"notes": [1]}), chunk({"notes": [2]}, "stop")], {"notes": [1, 2]}),
        (
            [chunk({"extra": {"a": "x", "b": 1}}), chunk({"extra": {"a": "x", "b": 2}}, "stop")],
            {"extra": {"a": "x", "b": 2}},
        ),
        ([chunk({"content": "a"}, None, seen=1), chunk({}, "stop", seen=2)], {"content": "a"}),
        (
            [
                event({**ENVELOPE, "trace": "t", "choices": []}),
                event({**ENVELOPE, "trace": "u", "choices": []}),
                chunk({}, "stop"),
            ],
            {},
        ),
        ([event({**ENVELOPE, "id": "another", "choices": []}), chunk({"content": "a"}, "stop")], {"content": "a"}),
        (
            [chunk({"role": "assistant", "content": "a"}), chunk({"role": "bot"}, "stop")],
            {"content": "a", "role": "assistant"},
        ),
        (
            [
                chunk({"content": [{"type": "text", "text": "a"}]}),
                chunk({"content": [{"type": "text", "text": "b"}]}, "stop"),
            ],
            {"content": "ab"},
        ),
        (
            [
                chunk({"content": "a"}),
                chunk({"content": [{"type": "text", "text": "b"}]}),
                chunk({"content": "c"}, "stop"),
            ],
            {"content": "abc"},
        ),
        (
            [
                chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "h"}]}]}),
                chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "m"}]}]}),
                chunk({"content": "a"}, "stop"),
            ],
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": "a"},
                ]
            },
        ),
        ([b"data: OK\n\n", chunk({"content": "a"}, "stop")], {"content": "a"}),
        ([chunk({"content": "a"}, "stop", score=1).replace(b'"score": 1', b'"score": NaN')], {"content": "a"}),
    ],
)
def test_labels_cost_no_answer(parts_of_answer: list[bytes], message: dict[str, Any]) -> None:
    """The words are all there, and the answer tells that it may differ from the server's own whole one."""
    assembler, whole = built(b"".join(parts_of_answer) + END)
    assert message.items() <= whole["choices"][0]["message"].items()
    assert assembler.difference
    assert not assembler.of_calls


# ---------------------------------------------------------------- incomplete streams


@given(st.data())
def test_a_stream_cut_short_is_no_answer(data: st.DataObject) -> None:
    """Wherever it is cut before the usage. Text, finish_reason and usage have to be there."""
    stream = chunk({"role": "assistant", "content": ""}) + chunk({"content": "a"}) + chunk({"content": "b"}, "stop")
    needed = stream + END.removesuffix(b"\n\ndata: [DONE]\n\n")
    with pytest.raises(Unassembled):
        assemble(needed[: data.draw(st.integers(0, len(needed) - 1))], cuts=[])
    assert assemble(needed, cuts=[])["choices"][0]["message"]["content"] == "ab"


def test_a_choice_without_an_end_is_no_answer() -> None:
    with pytest.raises(Unassembled):
        assemble(chunk({"content": "a"}, "stop") + END, choices=2)
    other = event({**ENVELOPE, "choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": None}]})
    with pytest.raises(Unassembled, match="finish_reason"):
        assemble(chunk({"content": "a"}, "stop") + other + END, choices=2)


def test_memory_is_bounded() -> None:
    """Nothing is held above the limit."""
    assembler, large = ChoicesAssembler(OPENAI_CHAT), chunk({"content": "x" * (8 << 20)})
    for _ in range(1 + ASSEMBLED_LIMIT // len(large)):
        assembler.feed(large)
    assert "64 MiB" in assembler.obstacle
    assert assembler.held_bytes == 0
    with pytest.raises(Unassembled):
        assembler.whole()


def test_texts_of_a_known_form_are_held_without_their_events() -> None:
    assembler, token = ChoicesAssembler(OPENAI_CHAT), chunk({"content": "word"})
    assembler.feed(token)
    first = assembler.held_bytes
    for _ in range(100):
        assembler.feed(token)
    assert assembler.held_bytes == first + 100 * len("word")


@pytest.mark.parametrize("torn", [False, True])
def test_nothing_after_done_is_of_the_answer(torn: bool) -> None:
    """Not even an event of the known form."""
    tokens = [chunk({"content": text}) for text in ("a", "b")]
    stream = b"".join([*tokens, chunk({}, "stop"), END])
    more = tokens[0] + event({"error": "late"})
    found = assemble(stream + more, cuts=[len(stream) // 3] if torn else None)
    assert found["choices"][0]["message"]["content"] == "ab"


@pytest.mark.parametrize("delta", ["text", ["text"], 5])
def test_a_delta_that_is_no_object_is_refused(delta: Any) -> None:
    with pytest.raises(Unassembled):
        assemble(chunk({"content": "a"}) + chunk(delta) + chunk({}, "stop") + END)


def test_words_in_the_usual_form_after_a_content_in_parts_are_kept() -> None:
    part = chunk({"content": [{"type": "text", "text": "three"}]})
    words = [
        chunk({"role": "assistant", "content": ""}),
        *(chunk({"content": word}) for word in ("one ", "two ", "four ")),
    ]
    assert message_of(*words[:3], part, words[3], words[3], chunk({}, "stop"))["content"] == "one two threefour four "
