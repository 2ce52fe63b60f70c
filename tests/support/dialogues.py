"""Requests, replies and streams of chat completions and Responses, drawn for property tests.

Everything drawn is in the normal form of its dialect: no synonyms (`max_tokens`), no members that say what their
absence says (`n: 1`), texts of one part as strings. A round trip gives back a normal form as it was.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
NAME = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
SCHEMA = st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(NAME, st.just({}))})
FORMAT = st.one_of(
    st.just({"type": "text"}),
    st.builds(
        lambda syntax, text: {"type": "grammar", "grammar": {"syntax": syntax, "definition": text}},
        st.sampled_from(["lark", "regex"]),
        TEXT,
    ),
)


def optional(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({}, optional=members)


# -- requests --------------------------------------------------------------------------------


def part(kind: str, **members: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({"type": st.just(kind), **members})


IMAGE = st.fixed_dictionaries({"url": TEXT}, optional={"detail": st.sampled_from(["low", "high"])})
FILE = optional(file_data=TEXT, file_id=TEXT, filename=TEXT)
AUDIO = st.fixed_dictionaries({"data": TEXT, "format": st.sampled_from(["mp3", "wav"])})
PARTS = st.lists(
    st.one_of(
        part("text", text=TEXT),
        part("image_url", image_url=IMAGE),
        part("file", file=FILE),
        part("input_audio", input_audio=AUDIO),
    ),
    min_size=1,
    max_size=3,
)
USER = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "developer"]), "content": st.one_of(TEXT, PARTS)}
)


@st.composite
def turn(draw: st.DrawFn, number: int) -> list[Json]:
    """A turn of the assistant with the results of its calls."""
    message: Json = {"role": "assistant"}
    message |= draw(optional(reasoning_content=TEXT, content=st.one_of(TEXT, refusals())))
    kinds = draw(st.lists(st.sampled_from(["function", "custom"]), max_size=3))
    if not kinds and "content" not in message:
        message["content"] = draw(TEXT)
    calls = [_call(draw, kind, f"call_{number}_{place}") for place, kind in enumerate(kinds)]
    if calls:
        message["tool_calls"] = calls
    content = st.one_of(TEXT, st.lists(part("text", text=TEXT), min_size=1, max_size=2))
    return [message, *({"role": "tool", "tool_call_id": call["id"], "content": draw(content)} for call in calls)]


def refusals() -> st.SearchStrategy[list[Json]]:
    return st.tuples(part("text", text=TEXT), part("refusal", refusal=TEXT)).map(list)


def _call(draw: st.DrawFn, kind: str, call_id: str) -> Json:
    text = "arguments" if kind == "function" else "input"
    return {"id": call_id, "type": kind, kind: {"name": draw(NAME), text: draw(TEXT)}}


@st.composite
def messages(draw: st.DrawFn) -> list[Json]:
    found = [draw(USER)]
    for number in range(draw(st.integers(0, 2))):
        found += [*draw(turn(number)), draw(USER)]
    return found


FUNCTION = st.fixed_dictionaries(
    {"name": NAME, "parameters": SCHEMA}, optional={"description": TEXT, "strict": st.just(True)}
)
CUSTOM = st.fixed_dictionaries({"name": NAME}, optional={"description": TEXT, "format": FORMAT})
TOOL = st.one_of(part("function", function=FUNCTION), part("custom", custom=CUSTOM))
CHOSEN = st.one_of(
    part("function", function=st.fixed_dictionaries({"name": NAME})),
    part("custom", custom=st.fixed_dictionaries({"name": NAME})),
)
ALLOWED = st.fixed_dictionaries({"mode": st.sampled_from(["auto", "required"]), "tools": st.lists(CHOSEN, min_size=1)})
CHOICE = st.one_of(st.sampled_from(["auto", "none", "required"]), CHOSEN, part("allowed_tools", allowed_tools=ALLOWED))
SHAPE = st.one_of(
    part("text"),
    part("json_object"),
    part(
        "json_schema",
        json_schema=st.fixed_dictionaries(
            {"name": NAME, "schema": SCHEMA}, optional={"strict": st.booleans(), "description": TEXT}
        ),
    ),
)
SHARED = {
    "stream": st.booleans(),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "parallel_tool_calls": st.booleans(),
    "metadata": st.dictionaries(NAME, TEXT, max_size=2),
    "prompt_cache_key": TEXT,
    "safety_identifier": TEXT,
    "service_tier": st.sampled_from(["auto", "flex"]),
    "user": TEXT,
}
CHAT_REQUEST = st.fixed_dictionaries(
    {"model": NAME, "messages": messages()},
    optional={
        **SHARED,
        "max_completion_tokens": st.integers(1, 9),
        "store": st.just(True),
        "reasoning_effort": st.sampled_from(["low", "high"]),
        "verbosity": st.sampled_from(["low", "high"]),
        "tools": st.lists(TOOL, min_size=1, max_size=3),
        "tool_choice": CHOICE,
        "response_format": SHAPE,
    },
)
LOGPROBS = st.sampled_from([{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}])
CHAT_REQUESTS = st.builds(lambda body, logprobs: {**body, **logprobs}, CHAT_REQUEST, LOGPROBS)


# -- answers ---------------------------------------------------------------------------------

TOKENS = st.integers(0, 1 << 40)


@st.composite
def usage(draw: st.DrawFn) -> Json:
    prompt, completion = draw(TOKENS), draw(TOKENS)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": draw(TOKENS), "cache_write_tokens": draw(TOKENS)},
        "completion_tokens_details": {"reasoning_tokens": draw(TOKENS)},
    }


TOKEN = st.fixed_dictionaries(
    {"token": TEXT, "logprob": st.floats(-9, 0), "bytes": st.just([1]), "top_logprobs": st.just([])}
)
CITATION = st.fixed_dictionaries({"start_index": TOKENS, "end_index": TOKENS, "title": TEXT, "url": TEXT})
HEAD = st.fixed_dictionaries({"id": NAME.map("chatcmpl-".__add__), "created": st.integers(0, 1 << 31), "model": NAME})


@st.composite
def answers(draw: st.DrawFn) -> tuple[Json, list[Json]]:
    """A chat completion, whole and as the chunks of a stream."""
    head, count = draw(HEAD), draw(usage())
    deltas: list[tuple[Json, Any]] = [({"role": "assistant", "content": ""}, None)]
    message: Json = {"role": "assistant", "content": None, "refusal": None}
    if thoughts := draw(st.lists(TEXT, max_size=3)):
        message["reasoning"] = "".join(thoughts)
        deltas += [({"reasoning": text}, None) for text in thoughts]
    entries: list[Any] = []
    if texts := draw(st.lists(TEXT, max_size=4)):
        message["content"] = "".join(texts)
        with_logprobs = draw(st.booleans())
        for text in texts:
            token = draw(TOKEN) if with_logprobs else None
            entries += [token] if token else []
            deltas.append(({"content": text}, {"content": [token]} if token else None))
        if cited := draw(st.lists(CITATION, max_size=2)):
            message["annotations"] = [{"type": "url_citation", "url_citation": each} for each in cited]
            deltas += [({"annotations": [each]}, None) for each in message["annotations"]]
    if refusals := draw(st.lists(TEXT, max_size=2)):
        message["refusal"] = "".join(refusals)
        deltas += [({"refusal": text}, None) for text in refusals]
    kinds = draw(st.lists(st.sampled_from(["function", "custom"]), max_size=3))
    calls, begun, rest = [], [], []
    for index, kind in enumerate(kinds):
        text, pieces = "arguments" if kind == "function" else "input", draw(st.lists(TEXT, max_size=3))
        call = {"id": f"call_{index}", "type": kind, kind: {"name": draw(NAME), text: "".join(pieces)}}
        calls.append(call)
        opening = {**call, "index": index, kind: {**call[kind], text: ""}}
        begun.append(({"tool_calls": [opening]}, None))
        rest += [({"tool_calls": [{"index": index, kind: {text: piece}}]}, None) for piece in pieces]
    deltas += begun + draw(st.permutations(rest)) if draw(st.booleans()) and _distinct(rest) else _in_turn(begun, rest)
    if calls:
        message["tool_calls"] = calls
    reason = draw(st.sampled_from(["length", "content_filter", "tool_calls" if calls else "stop"]))
    tier = draw(optional(service_tier=st.just("flex")))
    chunks = [
        {**head, "object": "chat.completion.chunk", "choices": [_choice(delta, logprobs)]} for delta, logprobs in deltas
    ]
    chunks.append({**head, "object": "chat.completion.chunk", **tier, "choices": [_choice({}, None, reason)]})
    chunks.append({**head, "object": "chat.completion.chunk", "choices": [], "usage": count})
    logprobs = {"content": entries, "refusal": None} if entries else None
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}
    return {**head, "object": "chat.completion", **tier, "choices": [choice], "usage": count}, chunks


def _distinct(rest: list[tuple[Json, Any]]) -> bool:
    """At most a piece per call: any order of pieces gives the same calls."""
    indexes = [delta["tool_calls"][0]["index"] for delta, _ in rest]
    return len(set(indexes)) == len(indexes)


def _in_turn(begun: list[tuple[Json, Any]], rest: list[tuple[Json, Any]]) -> list[tuple[Json, Any]]:
    """Each call with its pieces, as most servers send them."""
    return [
        delta
        for index, opening in enumerate(begun)
        for delta in (opening, *(each for each in rest if each[0]["tool_calls"][0]["index"] == index))
    ]


def _choice(delta: Json, logprobs: Any, reason: str | None = None) -> Json:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def as_stream(chunks: list[Json]) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


def events(stream: bytes) -> list[Json]:
    """The data of a stream's events; `[DONE]` is left out."""
    blocks = [block for block in stream.decode().split("\n\n") if block]
    lines = [line[6:] for block in blocks for line in block.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def assembled(chunks: list[Json]) -> Json:
    """The whole chat completion that a stream's chunks say, read as the SDKs do."""
    whole: Json = {"usage": None}
    message: Json = {"role": "assistant", "content": None, "refusal": None}
    choice: Json = {"index": 0, "message": message, "logprobs": None, "finish_reason": None}
    for chunk in chunks:
        whole |= {name: value for name, value in chunk.items() if name not in ("choices", "usage")}
        whole["usage"] = chunk.get("usage") or whole["usage"]
        for each in chunk["choices"]:
            _add(message, each["delta"])
            choice["finish_reason"] = each["finish_reason"] or choice["finish_reason"]
            if each["logprobs"]:
                choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
                choice["logprobs"]["content"] += each["logprobs"]["content"]
    return {**whole, "object": "chat.completion", "choices": [choice]}


def _add(message: Json, delta: Json) -> None:
    for name in ("content", "refusal", "reasoning"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    if delta.get("annotations"):
        message.setdefault("annotations", []).extend(delta["annotations"])
    for call in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"id": call["id"], "type": call["type"], call["type"]: dict(call[call["type"]])})
        else:
            kind = calls[call["index"]]["type"]
            for name, text in call[kind].items():
                calls[call["index"]][kind][name] += text
