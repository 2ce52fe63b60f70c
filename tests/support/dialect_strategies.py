"""Strategies for requests and answers of both dialects, in the form that a translation there and back yields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]

words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
base64 = st.sampled_from(["aGVsbG8=", "AAEC", "/+8="])
names = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
urls = st.sampled_from(["https://images.example/cat.png", "http://127.0.0.1/x?y=1#z"])
leaves = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e6, 1e6) | words
json_objects = st.dictionaries(names, st.recursive(leaves, lambda inner: st.lists(inner, max_size=2), max_leaves=3))
schemas = st.builds(lambda fields: {"type": "object", "properties": fields}, json_objects)
efforts = st.sampled_from(["low", "medium", "high", "xhigh", "max"])
fractions = st.floats(0, 1)


def optional(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({}, optional=members)


def lists(of: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[list[Any]]:
    return st.lists(of, min_size=least, max_size=3)


# --------------------------------------------------------------------------- Messages

texts = st.builds(lambda text: {"type": "text", "text": text}, words)
images = st.builds(
    lambda source: {"type": "image", "source": source},
    st.builds(lambda url: {"type": "url", "url": url}, urls)
    | st.builds(lambda data: {"type": "base64", "media_type": "image/png", "data": data}, base64),
)
documents = st.builds(
    lambda data, title: {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": data},
        **title,
    },
    base64,
    optional(title=words),
)
thoughts = st.builds(
    lambda text, signature: {"type": "thinking", "thinking": text, "signature": signature}, words, words
) | st.builds(lambda data: {"type": "redacted_thinking", "data": data}, words)


def plain(blocks: list[Json]) -> str | list[Json]:
    """Content as a translation writes it: one text is no list."""
    return blocks[0]["text"] if len(blocks) == 1 and blocks[0]["type"] == "text" else blocks


@st.composite
def message_turns(draw: st.DrawFn) -> list[Json]:
    """Turns of a conversation with tool calls and their results; the user speaks last."""
    turns = []
    for number in range(draw(st.integers(0, 3))):
        turns.append({"role": "user", "content": plain(draw(lists(texts | images | documents, 1)))})
        calls = [
            {"type": "tool_use", "id": f"toolu_{number}-{n}", "name": draw(names), "input": draw(json_objects)}
            for n in range(draw(st.integers(0, 3)))
        ]
        said = [*draw(lists(thoughts)), *draw(lists(texts, 0 if calls else 1)), *calls]
        turns.append({"role": "assistant", "content": plain(said)})
        if calls:
            results = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": plain(draw(lists(texts, 1)))}
                for call in calls
            ]
            turns.append({"role": "user", "content": results + draw(lists(texts | images))})
            turns.append({"role": "assistant", "content": draw(words)})
    return [*turns, {"role": "user", "content": plain(draw(lists(texts | images | documents, 1)))}]


message_tools = lists(
    st.builds(
        lambda name, schema, more: {"name": name, "input_schema": schema, **more},
        names,
        schemas,
        optional(description=words, strict=st.booleans()),
    ),
    1,
)
message_choices = st.builds(
    lambda choice, single: {**choice, **({"disable_parallel_tool_use": True} if single else {})},
    st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}]),
    st.booleans(),
) | st.just({"type": "none"})
thinking_options = st.sampled_from([{}, {"thinking": {"type": "disabled"}}]) | st.builds(
    lambda effort: {"thinking": {"type": "adaptive"}, "output_config": {"effort": effort}}, efforts
)


def while_thinking(body: Json, is_thinking: bool) -> Json:
    """Without what Anthropic refuses of a model that thinks."""
    if not is_thinking:
        return body
    is_forced = body.get("tool_choice") == "required" or isinstance(body.get("tool_choice"), dict)
    left_out = {"temperature", "top_p"} | ({"tool_choice", "parallel_tool_calls"} if is_forced else set())
    return {name: value for name, value in body.items() if name not in left_out}


@st.composite
def message_requests(draw: st.DrawFn) -> Json:
    body: Json = {"model": draw(names), "max_tokens": draw(st.integers(1, 10**6)), "messages": draw(message_turns())}
    body |= draw(
        optional(
            system=lists(texts, 1).map(plain),
            temperature=fractions,
            top_p=fractions,
            stop_sequences=lists(words, 1),
            stream=st.booleans(),
            metadata=st.builds(lambda user: {"user_id": user}, words),
            service_tier=st.sampled_from(["auto", "standard_only"]),
        )
    )
    body |= draw(thinking_options)
    if draw(st.booleans()):
        schema = {"format": {"type": "json_schema", "schema": draw(schemas)}}
        body["output_config"] = {**schema, **body.get("output_config", {})}
    if draw(st.booleans()):
        body |= {"tools": draw(message_tools), **draw(optional(tool_choice=message_choices))}
    return while_thinking(body, body.get("thinking") == {"type": "adaptive"})


# --------------------------------------------------------------------------- chat

chat_texts = st.builds(lambda text: {"type": "text", "text": text}, words)
chat_images = st.builds(
    lambda url: {"type": "image_url", "image_url": {"url": url}},
    urls | base64.map(lambda data: f"data:image/webp;base64,{data}"),
)
files = st.builds(
    lambda data, name: {"type": "file", "file": {"filename": name, "file_data": f"data:application/pdf;base64,{data}"}},
    base64,
    words,
)


def arguments(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@st.composite
def chat_turns(draw: st.DrawFn) -> list[Json]:
    """Messages of a conversation with tool calls and their results; the user speaks last."""
    turns: list[Json] = []
    if draw(st.booleans()):
        turns.append({"role": "system", "content": plain(draw(lists(chat_texts, 1)))})
    for number in range(draw(st.integers(0, 3))):
        turns.append({"role": "user", "content": plain(draw(lists(chat_texts | chat_images | files, 1)))})
        calls = [
            {"id": f"call_{number}-{n}", "type": "function", "function": {"name": draw(names), "arguments": "{}"}}
            for n in range(draw(st.integers(0, 3)))
        ]
        for call in calls:
            call["function"]["arguments"] = arguments(draw(json_objects.map(integral)))
        turns.append(draw(assistant_messages(calls)))
        turns += [{"role": "tool", "tool_call_id": call["id"], "content": draw(words)} for call in calls]
    return [*turns, {"role": "user", "content": plain(draw(lists(chat_texts | chat_images | files, 1)))}]


def integral(value: Any) -> Any:
    """Without floats, which JSON may write in several ways."""
    if isinstance(value, dict):
        return {name: integral(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [integral(inner) for inner in value]
    return int(value) if isinstance(value, float) else value


@st.composite
def assistant_messages(draw: st.DrawFn, calls: list[Json]) -> Json:
    message: Json = {"role": "assistant", "content": draw(words) if not calls or draw(st.booleans()) else None}
    shape = {"format": "anthropic-claude-v1"}
    details = [
        {"type": "reasoning.text", "text": text, "signature": signature, "index": n, **shape}
        for n, (text, signature) in enumerate(draw(lists(st.tuples(words, words))))
    ]
    if draw(st.booleans()):
        details.append({"type": "reasoning.encrypted", "data": draw(words), "index": len(details), **shape})
    if thought := "".join(detail.get("text", "") for detail in details):
        message["reasoning_content"] = thought
    return message | ({"reasoning_details": details} if details else {}) | ({"tool_calls": calls} if calls else {})


chat_tools = lists(
    st.builds(
        lambda name, schema, more: {"type": "function", "function": {"name": name, "parameters": schema, **more}},
        names,
        schemas,
        optional(description=words, strict=st.booleans()),
    ),
    1,
)
chat_choices = st.builds(
    lambda choice, single: {"tool_choice": choice, **({"parallel_tool_calls": False} if single else {})},
    st.sampled_from(["auto", "required", {"type": "function", "function": {"name": "f"}}]),
    st.booleans(),
) | st.sampled_from([{}, {"tool_choice": "none"}])
json_formats = st.builds(
    lambda schema: {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}, schemas
)


@st.composite
def chat_requests(draw: st.DrawFn) -> Json:
    body: Json = {"model": draw(names), "messages": draw(chat_turns())}
    body |= draw(
        optional(
            max_completion_tokens=st.integers(1, 10**6),
            temperature=fractions,
            top_p=fractions,
            stop=lists(words, 1),
            stream=st.booleans(),
            user=words,
            service_tier=st.sampled_from(["auto", "default"]),
            reasoning_effort=efforts | st.just("none"),
            response_format=json_formats,
        )
    )
    body |= {"tools": draw(chat_tools), **draw(chat_choices)} if draw(st.booleans()) else {}
    return while_thinking(body, body.get("reasoning_effort", "none") != "none")


# --------------------------------------------------------------------------- answers

usages = st.builds(
    lambda counts, thought: {**counts, **thought},
    st.fixed_dictionaries(
        {"input_tokens": st.integers(0, 9), "output_tokens": st.integers(0, 99)},
        optional={
            "cache_read_input_tokens": st.integers(0, 9),
            "cache_creation_input_tokens": st.integers(0, 9),
        },
    ),
    st.sampled_from([{}, {"output_tokens_details": {"thinking_tokens": 3}}]),
)


@st.composite
def answers(draw: st.DrawFn) -> Json:
    """A message as Anthropic answers."""
    texts_said = [{"type": "text", "text": draw(words)}] if draw(st.booleans()) else []
    calls = [
        {"type": "tool_use", "id": f"toolu_{n}", "name": draw(names), "input": draw(json_objects.map(integral))}
        for n in range(draw(st.integers(0, 3)))
    ]
    thought = [draw(thoughts)] if draw(st.booleans()) else []
    reason = "tool_use" if calls else draw(st.sampled_from(["end_turn", "max_tokens", "stop_sequence", "refusal"]))
    return {
        "id": draw(names),
        "type": "message",
        "role": "assistant",
        "model": draw(names),
        "content": [*thought, *texts_said, *calls],
        "stop_reason": reason,
        "stop_sequence": draw(words) if reason == "stop_sequence" else None,
        "usage": draw(usages),
    }


def pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def message_events(answer: Json, size: int = 3) -> Iterator[Json]:
    """The events by which Anthropic streams an answer, `size` characters a delta."""
    start = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": start | {"usage": {**answer["usage"], "output_tokens": 1}}}
    yield {"type": "ping"}
    for index, block in enumerate(answer["content"]):
        empty, deltas = block_deltas(block, size)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield from ({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas)
        yield {"type": "content_block_stop", "index": index}
    stop = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": stop, "usage": {"output_tokens": answer["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def block_deltas(block: Json, size: int) -> tuple[Json, list[Json]]:
    """The empty block of a start event, and the deltas that fill it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": part} for part in pieces(block["text"], size)]
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": part} for part in pieces(block["thinking"], size)]
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [*deltas, signed]
    if block["type"] == "tool_use":
        parts = pieces(arguments(block["input"]), size) if block["input"] else [""]
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": part} for part in parts]
    return block, []


def named_sse(events: Iterator[Json]) -> list[bytes]:
    """Events on the wire, as Anthropic writes them."""
    return [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), arguments(event).encode()) for event in events]
