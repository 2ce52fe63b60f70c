"""Responses over chat completions: which members are refused, and unusual servers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from backends.interface import Failure, FailureKind
from backends.translation.omissions import Omissions
from backends.translation.registry import CHAT_TO_MESSAGES, CHAT_TO_RESPONSES, RESPONSES_TO_CHAT
from backends.translation.translation import Translation, UntranslatableError
from tests.support.dialogues import Json, as_stream, events

IMAGE_BY_ID = {"type": "input_image", "detail": "auto", "file_id": "file-1"}
FILE_BY_URL = {"type": "input_file", "file_url": "https://example.com/a.pdf"}
CHOSEN_SEARCH = {"type": "web_search_preview"}
FAILED = Failure(FailureKind.RESET, "The backend broke.")


def said(*items: Json, **members: Any) -> Json:
    return {"model": "m", "input": list(items), **members}


def user(*parts: Json) -> Json:
    return {"role": "user", "content": list(parts)}


REFUSED_RESPONSES: list[tuple[Json, str, str]] = [  # members, the place named, the name to drop
    (said(background=True), "background", "background"),
    (said(previous_response_id="resp_1"), "previous_response_id", "previous_response_id"),
    (said(conversation="conv_1"), "conversation", "conversation"),
    (said(conversation={"id": "conv_1"}), "conversation", "conversation"),
    (said(prompt={"id": "p"}), "prompt", "prompt"),
    (said(truncation="auto"), "truncation", "truncation"),
    (said(max_tool_calls=3), "max_tool_calls", "max_tool_calls"),
    (said(context_management=[{"type": "compaction"}]), "context_management", "context_management"),
    (said(stream_options={"include_obfuscation": True}), "stream_options", "stream_options"),
    (said(include=["web_search_call.action.sources"]), "include", "web_search_call.action.sources"),
    (said(something_new=1), "something_new", "something_new"),
    (said(reasoning={"summary": "rhymed"}), "reasoning.summary", "summary"),
    (said(reasoning={"mode": "pro"}), "reasoning.mode", "mode"),
    (said(text={"new": 1}), "text.new", "new"),
    (said(tools=[{"type": "web_search"}]), "tools[0]", "web_search"),
    (said(tools=[{"type": "mcp", "server_label": "x"}]), "tools[0]", "mcp"),
    (said(tools=[{"type": "function", "name": "f", "async": True}]), "tools[0].async", "async"),
    (said(tool_choice=CHOSEN_SEARCH), "tool_choice", "web_search_preview"),
    (said(user(IMAGE_BY_ID)), "input[0].content[0].file_id", "file_id"),
    (said(user(FILE_BY_URL)), "input[0].content[0].file_url", "file_url"),
    (said(user({"type": "input_hologram"})), "input[0].content[0]", "input_hologram"),
    (
        said({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_audio", "input_audio": {}}]}),
        "input[0].output[0]",
        "input_audio",
    ),
    (said(stream_options={"include_usage": True, "new": 1}), "stream_options", "stream_options"),
    (said(stream_options=[1]), "stream_options", "stream_options"),
]


def asked(message: Json | None = None, **members: Any) -> Json:
    return {"model": "m", "messages": [message or {"role": "user", "content": "a"}], **members}


CALL = {"id": "c", "type": "hologram", "hologram": {}}
REFUSED_CHAT: list[tuple[Json, str, str]] = [
    (asked(n=2), "n", "n"),
    (asked(stop=["a"]), "stop", "stop"),
    (asked(logit_bias={"1": 2}), "logit_bias", "logit_bias"),
    (asked(modalities=["audio"]), "modalities", "modalities"),
    (asked(audio={"voice": "a"}), "audio", "audio"),
    (asked(web_search_options={}), "web_search_options", "web_search_options"),
    (asked(functions=[{"name": "f"}]), "functions", "functions"),
    (asked(stream_options={"include_obfuscation": True}), "stream_options.include_obfuscation", "include_obfuscation"),
    (asked({"role": "function", "name": "f", "content": "a"}), "messages[0]", "function"),
    (asked({"role": "assistant", "audio": {"id": "a"}}), "messages[0].audio", "audio"),
    (asked({"role": "assistant", "tool_calls": [CALL]}), "messages[0].tool_calls[0]", "hologram"),
    (asked(tools=[{"type": "web_search"}]), "tools[0]", "web_search"),
]
BOTH = [(RESPONSES_TO_CHAT, *row) for row in REFUSED_RESPONSES] + [(CHAT_TO_RESPONSES, *row) for row in REFUSED_CHAT]


@pytest.mark.parametrize(("translation", "body", "param", "name"), BOTH, ids=[f"{row[2]}:{row[3]}" for row in BOTH])
def test_a_member_without_an_equivalent_is_refused_by_name_or_dropped(
    translation: Translation, body: Json, param: str, name: str
) -> None:
    with pytest.raises(UntranslatableError) as refused:
        translation.request(body, Omissions())
    assert refused.value.param == param
    assert param in str(refused.value)
    translation.request(body, Omissions({name}))
    path = re.sub(r"\[\d+\]", "", param)
    if path != name and name != "web_search_call.action.sources":
        translation.request(body, Omissions({path if path.endswith(f".{name}") else f"{path}.{name}"}))


MALFORMED = [
    {"model": "m", "input": 5},
    {"model": "m", "input": ["a"]},
    {"model": "m", "input": [{"role": "user", "content": [[]]}]},
    {"model": "m", "input": [{"type": ["message"]}]},
    {"model": "m", "input": [{"type": "function_call", "call_id": "c"}]},
    {"model": "m", "input": "a", "tools": {}},
    {"model": "m", "input": "a", "tools": [{"type": "function"}]},
    {"model": "m", "input": "a", "text": "json"},
    {"model": "m", "input": "a", "include": "all"},
    {"model": "m", "input": "a", "instructions": ["a"]},
]


@pytest.mark.parametrize("body", MALFORMED, ids=str)
def test_a_malformed_request_is_refused_by_name(body: Json) -> None:
    with pytest.raises(UntranslatableError) as refused:
        RESPONSES_TO_CHAT.request(body, Omissions())
    assert refused.value.param


def test_members_that_say_what_their_absence_says_are_accepted() -> None:
    """As Codex and the SDKs send them."""
    usual = {"store": False, "background": False, "truncation": "disabled", "include": ["reasoning.encrypted_content"]}
    codex = {"client_metadata": {"x-codex-window-id": "1:0"}}
    body = said(**usual, **codex, reasoning={"effort": "low", "summary": "auto"}, tools=[], previous_response_id=None)
    chat = RESPONSES_TO_CHAT.request({**body, "input": "hi", "instructions": "be brief"}, Omissions())
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert chat == {"model": "m", "messages": messages, "reasoning_effort": "low"}
    usual = {"n": 1, "modalities": ["text"], "presence_penalty": 0, "logit_bias": {}, "logprobs": False, "stop": None}
    native = CHAT_TO_RESPONSES.request(asked(**usual, max_tokens=5), Omissions())
    assert native.keys() == {"model", "input", "store", "max_output_tokens", "include"}


@pytest.mark.parametrize(
    ("item", "noted"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "input.item_reference"),
        ({"id": "msg_1"}, "input.item_reference"),
        ({"type": "compaction", "encrypted_content": "gAAA"}, "input.compaction"),
        ({"type": "mcp_list_tools", "server_label": "s", "tools": []}, "input.mcp_list_tools"),
        (
            {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAA"},
            "input.reasoning.encrypted_content",
        ),
    ],
)
def test_an_item_that_only_its_maker_reads_is_left_out_and_noted(item: Json, noted: str) -> None:
    """Never a 400 in mid-conversation."""
    left = Omissions()
    sent = RESPONSES_TO_CHAT.request(said(item, {"role": "user", "content": "hi"}), left)
    assert (sent["messages"], list(left.noted)) == ([{"role": "user", "content": "hi"}], [noted])


def test_a_search_of_the_provider_is_a_text_of_the_assistant() -> None:
    item = {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}}
    [message] = RESPONSES_TO_CHAT.request(said(item), Omissions())["messages"]
    assert message == {"role": "assistant", "content": '[web_search_call] {"type":"search","query":"q"}'}


def test_telemetry_of_codex_in_an_item_is_no_part_of_the_prompt() -> None:
    item = {**user({"type": "input_text", "text": "hi"}), "internal_chat_message_metadata_passthrough": {"turn": "1"}}
    (message,) = RESPONSES_TO_CHAT.request(said(item), Omissions())["messages"]
    assert message == {"role": "user", "content": [{"type": "text", "text": "hi"}]}


@pytest.mark.parametrize("usage", [True, False, None])
def test_a_wish_for_usage_is_met_without_an_option(usage: bool | None) -> None:
    """Benchmarks send chat's option to Responses too; a stream of Responses ends with its usage anyway."""
    options = {"include_usage": usage, "include_obfuscation": False}
    assert "stream_options" not in RESPONSES_TO_CHAT.request(said(stream_options=options), Omissions())


def test_the_phase_of_a_turn_sent_back_is_no_part_of_the_prompt() -> None:
    item = {"role": "assistant", "content": "a", "phase": "commentary"}
    left = Omissions()
    assert RESPONSES_TO_CHAT.request(said(item), left)["messages"] == [{"role": "assistant", "content": "a"}]
    assert left.noted == {"input.phase": "input.phase"}


SEEN = {"type": "input_image", "image_url": "https://images.example/cat.png"}
PART = {"type": "image_url", "image_url": {"url": SEEN["image_url"]}}


def output_of(call_id: str, *parts: Json) -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": list(parts)}


@pytest.mark.parametrize(
    ("after", "parts"),
    [
        ([], [[PART]]),
        ([user({"type": "input_text", "text": "and?"})], [[PART, {"type": "text", "text": "and?"}]]),
        ([{"role": "user", "content": "and?"}], [[PART, {"type": "text", "text": "and?"}]]),
        ([{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}], [[PART], "c"]),
        ([{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}], [[PART], "c"]),
    ],
)
def test_a_picture_of_a_tool_follows_all_results_in_the_users_message(after: list[Json], parts: list[Any]) -> None:
    """A chat's tool messages hold texts alone, and follow the calls at once."""
    results = [output_of("a", {"type": "input_text", "text": "seen"}, SEEN), output_of("b")]
    messages = RESPONSES_TO_CHAT.request(said(*results, *after), Omissions())["messages"]
    assert [(each["tool_call_id"], each["content"]) for each in messages[:2]] == [
        ("a", [{"type": "text", "text": "seen"}]),
        ("b", []),
    ]
    assert messages[2]["role"] == "user"
    assert [each["content"] for each in messages if each["role"] == "user"] == parts


def test_a_picture_of_a_tool_reaches_messages_in_the_turn_of_the_results() -> None:
    chat = RESPONSES_TO_CHAT.request(said(call_item("{}"), output_of("c", SEEN)), Omissions())
    turn = CHAT_TO_MESSAGES.request(chat, Omissions())["messages"][1]
    assert [block["type"] for block in turn["content"]] == ["tool_result", "image"]


def test_chat_callers_are_stored_nowhere_unless_they_ask() -> None:
    """The default of Responses is to store for 30 days."""
    assert CHAT_TO_RESPONSES.request(asked(), Omissions())["store"] is False
    assert CHAT_TO_RESPONSES.request(asked(store=True), Omissions())["store"] is True


def test_the_items_of_a_turn_become_one_message_before_its_results() -> None:
    """Also where text or reasoning stands between calls: results must follow the message with their calls."""

    def call(number: int) -> Json:
        return {"type": "function_call", "id": "fc", "call_id": f"c{number}", "name": "f", "arguments": "{}"}

    def result(number: int) -> Json:
        return {"type": "function_call_output", "call_id": f"c{number}", "output": "r"}

    text = {"type": "message", "id": "m", "status": "completed", "role": "assistant"}
    text["content"] = [{"type": "output_text", "text": "t", "annotations": [{"type": "url_citation"}], "logprobs": []}]
    thought = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "s"}]}
    items = [thought, call(1), text, thought, call(2), result(1), result(2), text, text]
    messages = RESPONSES_TO_CHAT.request(said(*items), Omissions())["messages"]
    assert [message["role"] for message in messages] == ["assistant", "tool", "tool", "assistant", "assistant"]
    assert [each["id"] for each in messages[0]["tool_calls"]] == ["c1", "c2"]
    assert messages[0] | {"tool_calls": None} == {
        "role": "assistant",
        "reasoning_content": "ss",
        "content": "t",
        "tool_calls": None,
    }
    assert messages[-1] == {"role": "assistant", "content": "t"}


@pytest.mark.parametrize("content", ["", None, [], [{"type": "output_text", "text": ""}]], ids=repr)
def test_an_empty_turn_of_the_assistant_is_an_empty_text(content: Any) -> None:
    """Chat servers accept no empty list of parts; more text of the turn stays a text."""
    empty = {"role": "assistant", "content": content}
    assert RESPONSES_TO_CHAT.request(said(empty), Omissions())["messages"] == [{"role": "assistant", "content": ""}]
    [message] = RESPONSES_TO_CHAT.request(said({"role": "assistant", "content": ""}, call_item("{}")), Omissions())[
        "messages"
    ]
    assert (message["content"], len(message["tool_calls"])) == ("", 1)


def call_item(arguments: str) -> Json:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}


@pytest.mark.parametrize("written", ['{"a": tru', "[1]", ""])
def test_malformed_arguments_of_the_history_stay_as_they_are_in_a_chat(written: str) -> None:
    """Both dialects have any text for arguments. Over Messages they are wrapped."""
    chat = RESPONSES_TO_CHAT.request(said(call_item(written)), Omissions())
    assert chat["messages"][0]["tool_calls"][0]["function"]["arguments"] == written
    [block] = CHAT_TO_MESSAGES.request(chat, Omissions())["messages"][0]["content"]
    assert block["input"] == ({"arguments": written} if written else {})


# -- streams of unusual servers ----------------------------------------------------------------


def chunk(delta: Json | None = None, finish: str | None = None, **members: Any) -> Json:
    return {"id": "x", "choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **members}


def answer(*chunks: Json) -> list[Json]:
    stream = RESPONSES_TO_CHAT.stream({"model": "m"})
    return events(stream.feed(as_stream(list(chunks))) + stream.close())


def output(found: list[Json]) -> Any:
    return found[-1]["response"]["output"]


def called(index: int | None, name: str, arguments: str, call_id: str | None) -> Json:
    members = {"function": {"name": name, "arguments": arguments}, "id": call_id, "index": index}
    return {"tool_calls": [{key: value for key, value in members.items() if value is not None}]}


def test_calls_that_share_an_index_are_told_apart_by_their_ids() -> None:
    """As of Gemini's and Ollama's compatible servers."""
    calls = output(answer(chunk(called(0, "f", "1", "a")), chunk(called(0, "g", "2", "b")), chunk(finish="tool_calls")))
    assert [(call["name"], call["arguments"], call["call_id"]) for call in calls] == [("f", "1", "a"), ("g", "2", "b")]


def test_a_call_without_an_id_gets_one() -> None:
    first, second = output(answer(chunk(called(0, "f", "1", None)), chunk(called(1, "g", "2", None))))
    assert first["call_id"]
    assert first["call_id"] != second["call_id"]


def test_a_stream_without_a_finish_reason_is_ended_by_the_error_alone() -> None:
    stream = RESPONSES_TO_CHAT.stream({"model": "m"})
    stream.feed(as_stream([chunk({"content": "a"})]).removesuffix(b"data: [DONE]\n\n"))
    assert stream.close() == b""
    (failed,) = events(stream.error(FAILED))
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "The backend broke."}
    assert stream.error(FAILED) == b""


def test_an_ended_stream_without_done_is_completed_at_its_close() -> None:
    stream = RESPONSES_TO_CHAT.stream({"model": "m"})
    stream.feed(as_stream([chunk({"content": "a"}), chunk(finish="stop")]).removesuffix(b"data: [DONE]\n\n"))
    assert events(stream.close())[-1]["type"] == "response.completed"
    assert stream.close() == b""


def test_an_error_event_fails_the_response() -> None:
    found = answer(chunk({"content": "a"}), {"error": {"message": "out of memory", "code": 500}})
    assert found[-1]["response"]["status"] == "failed"
    assert len([event for event in found if event["type"] == "response.failed"]) == 1


HOSTILE: list[Any] = [
    {"choices": 5},
    {"choices": [5, {"delta": 5}]},
    {"choices": [{"delta": {"content": 5, "tool_calls": [5, {"index": [], "function": 5}]}}]},
    {"id": 5, "created": "now", "model": {}, "usage": [], "choices": []},
    {"usage": {"prompt_tokens": 1 << 70, "prompt_tokens_details": 5}, "choices": []},
    {"choices": [{"delta": {"annotations": 5, "content": "\ud800"}, "finish_reason": {}, "logprobs": {"content": 1}}]},
    {"created": float("nan"), "choices": []},
]


@pytest.mark.parametrize("event", HOSTILE, ids=str)
def test_a_chunk_of_no_known_shape_breaks_nothing(event: Any) -> None:
    assert answer(event, chunk({"content": "a"}, "stop"))[-1]["type"] == "response.completed"
    assert RESPONSES_TO_CHAT.reply(event, {"model": "m"})["status"] == "completed"


def test_content_in_parts_is_read_as_thinking_and_text() -> None:
    """As Mistral's reasoning models send it."""
    thinking = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "yes"}]
    thought, message = output(answer(chunk({"content": thinking}), chunk(finish="stop")))
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "yes"


def test_a_native_stream_without_deltas_of_arguments_gives_the_call() -> None:
    item = {"type": "function_call", "id": "fc", "call_id": "c", "name": "f", "arguments": "{}"}
    stream = CHAT_TO_RESPONSES.stream({"model": "m"})
    native = [
        {"type": "response.created", "response": {"id": "resp_1", "created_at": 5.0, "model": "m"}},
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "arguments": ""}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"id": "resp_1", "status": "completed", "output": [item]}},
    ]
    found = events(stream.feed(as_stream(native)))
    texts = [
        call["function"]["arguments"] for each in found for call in each["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert texts == ["", "{}"]
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "event",
    [
        {"type": "error", "code": "rate_limit_exceeded", "message": "slow down", "param": None},
        {"type": "error", "error": {"code": "rate_limit_exceeded", "message": "slow down"}},
        {"type": "response.failed", "response": {"error": {"code": "rate_limit_exceeded", "message": "slow down"}}},
    ],
    ids=["flat", "nested", "failed"],
)
def test_a_failed_native_stream_ends_by_an_error_and_nothing_more(event: Json) -> None:
    stream = CHAT_TO_RESPONSES.stream({"model": "m"})
    data = stream.feed(as_stream([event]).removesuffix(b"data: [DONE]\n\n")) + stream.close()
    (error,) = events(data)
    assert error["error"]["code"] == "rate_limit_exceeded"
    assert b"[DONE]" not in data
