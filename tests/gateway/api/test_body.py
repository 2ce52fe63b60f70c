"""Parsing of bodies from caches: known text is not decoded again, and nothing invalid passes for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.interface import BackendConfig, BackendRequest, Operation
from backends.vllm import Vllm
from gateway.api import inference_request as body
from gateway.api.api_error import ApiError
from gateway.api.inference_request import KEY_HEADERS, ParsedBody, parse, parse_full, read
from gateway.strict_json import decode, encode
from gateway.tokenize.prompt import Piece
from tests.e2e.test_bad_input import BODIES
from tests.support.json_texts import Writer

ENGINE = Vllm(BackendConfig("vllm", "served"))
OURS = {"model", "stream", "stream_options", "max_tokens", "max_completion_tokens"}  # what we may change
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["x", "user", "a: b", 'c":', "é\u2028😀", "\\\\", "image_url", "json_schema", ""])
)
NAMES = st.sampled_from(
    [
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "tools",
        "functions",
        "response_format",
        "role",
        "content",
        "type",
        "text",
        "image_url",
        "function",
        "tool_calls",
        "include_usage",
        "stop",
        "vendor",
        "a:",
    ]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
)
TEXT = st.text(max_size=8) | st.just("word: " * 400)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXT})
    | st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.dictionaries(NAMES, SCALARS, max_size=2)}),
    max_size=3,
)
CALLS = st.lists(st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT})}))
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", ""])},
    optional={"content": TEXT | st.none() | PARTS, "tool_calls": CALLS, "name": SCALARS},
)
TOOLS = st.lists(st.dictionaries(NAMES, VALUES, max_size=2), max_size=2)
SENSIBLE = st.fixed_dictionaries(
    {"model": st.sampled_from(["m", "é"])},
    optional={
        "stream": st.booleans() | st.none(),
        "max_tokens": st.integers(1, 9),
        "tools": TOOLS,
        "functions": VALUES,
        "response_format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_schema"])}),
        "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
        "vendor": VALUES,
        "seed": SCALARS,
    },
)
CHAT = st.builds(lambda rest, said: {**rest, "messages": said}, SENSIBLE, st.lists(MESSAGE, min_size=1, max_size=4))
COMPLETION = st.builds(lambda rest, prompt: {**rest, "prompt": prompt}, SENSIBLE, TEXT | st.lists(st.integers(0, 9)))
ODD = st.dictionaries(NAMES | st.sampled_from(["model", "messages", "prompt"]), VALUES, max_size=4)


@pytest.fixture(autouse=True)
def unknown() -> Iterator[None]:
    """Starts with empty caches."""
    forget()
    yield
    forget()


def forget() -> None:
    body._messages.clear()
    body._parameters.clear()


def outcome(operation: Operation, raw: bytes, key: str | None = "key") -> Any:
    """All that was parsed, or the error. `key` None: parsed in full."""
    try:
        found = parse_full(operation, raw) if key is None else read(operation, raw, key)
    except ApiError as refusal:
        return refusal.status, refusal.message, refusal.param
    return repr(plain(found.members)), found.parameters, found.user_turns, found.images, pieces(found)


def plain(members: Mapping[str, Any]) -> Any:
    return decode(encode(members))


def pieces(found: ParsedBody) -> list[list[Piece]]:
    assert len(found.prompt.sources) == len(found.prompt.digests)
    return [found.prompt.pieces(part) for part in range(len(found.prompt.digests))]


def chat(*messages: Any, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages} | more).encode()


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


# --------------------------------------------------------------------------- both ways agree


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from([Operation.CHAT, Operation.COMPLETION]), CHAT | COMPLETION | ODD)
def test_a_cached_parse_equals_a_full_parse(data: st.DataObject, operation: Operation, value: Any) -> None:
    """Of any body, in any spelling, the first time and again: the same members, parameters and prompt, or the same
    refusal."""
    forget()
    raw = Writer(data.draw, twice=True).write(value).encode()
    expected = outcome(operation, raw, None)
    assert outcome(operation, raw) == expected
    assert outcome(operation, raw) == expected
    assert outcome(operation, raw, "another key") == expected


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from([Operation.CHAT, Operation.COMPLETION]), CHAT | COMPLETION)
def test_a_body_that_is_almost_known_is_judged_as_if_nothing_were(
    data: st.DataObject, operation: Operation, value: Any
) -> None:
    """One byte changed, added or removed."""
    forget()
    raw = bytearray(Writer(data.draw).write(value).encode())
    outcome(operation, bytes(raw))
    at, byte = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.sampled_from(b'{}[]:,"\\ua0\xff\x1f1-.eN '))
    match data.draw(st.sampled_from(["other", "more", "less"])):
        case "other":
            raw[at] = byte
        case "more":
            raw.insert(at, byte)
        case _:
            del raw[at]
    assert outcome(operation, bytes(raw)) == outcome(operation, bytes(raw), None)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.booleans(), CHAT)
def test_a_forwarded_body_equals_the_callers_except_for_gateway_fields(
    data: st.DataObject, again: bool, value: dict[str, Any]
) -> None:
    """Compared with Python's own parser; in the caller's order."""
    forget()
    raw = Writer(data.draw).write(value).encode()
    if again:
        outcome(Operation.CHAT, raw)
    try:
        found = read(Operation.CHAT, raw, "key")
    except ApiError:
        return
    asked = BackendRequest(Operation.CHAT, found.members, "served", found.parameters.stream, max_tokens=5)
    sent, written = json.loads(ENGINE.call(asked).body), json.loads(raw)
    assert repr({k: v for k, v in sent.items() if k not in OURS}) == repr(
        {k: v for k, v in written.items() if k not in OURS}
    )
    assert (sent["model"], bool(sent.get("stream"))) == ("served", bool(written.get("stream")))
    assert min(sent[name] for name in ("max_tokens", "max_completion_tokens") if sent.get(name)) <= 5


@pytest.mark.parametrize("depth", range(194, 202))
@pytest.mark.parametrize("place", [b'"messages":[{"role":"user","x":%b}]', b'"messages":[{"role":"user"}],"x":%b'])
def test_nesting_is_bounded_alike(place: bytes, depth: int) -> None:
    """Validation in parts has the same depth limit as validation of the whole."""
    raw = b'{"model":"m",' + place % (b"[" * depth + b"]" * depth) + b"}"
    assert outcome(Operation.CHAT, raw) == outcome(Operation.CHAT, raw, None)


def test_the_same_fields_mean_other_things_to_other_operations() -> None:
    """Fields accepted beside a text are validated again beside messages."""
    beside = b'"model":"m","tools":{"a":1}'
    assert outcome(Operation.COMPLETION, b'{%b,"prompt":"x"}' % beside)[1].tools
    assert outcome(Operation.CHAT, b'{%b,"messages":[{"role":"user"}]}' % beside)[0] == 400


@pytest.mark.parametrize("name", BODIES)
def test_mistaken_and_hostile_bodies_are_refused_in_the_same_words(name: str) -> None:
    """Parsed from caches or in full, and however often they come."""
    expected = outcome(Operation.CHAT, BODIES[name], None)
    assert [outcome(Operation.CHAT, BODIES[name]) for _ in range(2)] == [expected] * 2


# --------------------------------------------------------------------------- caches


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """JSON texts that were decoded: messages and other fields."""
    texts: list[bytes] = []
    for name in ("element", "decode"):
        real = getattr(body, name)

        def judge(data: Any, *depth: int, real: Any = real) -> Any:
            texts.append(bytes(data))
            return real(data, *depth)

        monkeypatch.setattr(body, name, judge)
    return texts


def test_a_conversations_next_turn_costs_its_new_messages(judged: list[bytes]) -> None:
    """Earlier messages and all other fields are known by digest."""
    turns = [said("one"), said("two", "assistant"), said("three")]
    outcome(Operation.CHAT, chat(*turns[:1], tools=[{"a": 1}]))
    judged.clear()
    outcome(Operation.CHAT, chat(*turns, tools=[{"a": 1}]))
    assert [json.loads(text) for text in judged] == turns[1:]


def test_the_parse_cache_is_separate_per_key(judged: list[bytes]) -> None:
    """Response times would reveal the prompt."""
    outcome(Operation.CHAT, chat(said("secret")), "one")
    first = judged.copy()
    judged.clear()
    outcome(Operation.CHAT, chat(said("secret")), "two")
    assert judged == first


@pytest.mark.parametrize("name", KEY_HEADERS)
def test_the_parse_cache_is_separate_per_key_in_any_header(judged: list[bytes], name: str) -> None:
    raw = chat(said("secret"))
    for key in ("one", "two"):
        judged.clear()
        parse(Operation.CHAT, raw, {name: key}, 0.0, "id")
        assert len(judged) == 2


def test_the_parse_cache_keeps_digests_only(judged: list[bytes]) -> None:
    """Digests and flags. Long model names are not cached, to bound memory."""
    for _ in range(2):
        outcome(Operation.CHAT, chat(said("x"), model="m" * 1_000))
    assert [json.loads(text) for text in judged] == [{"model": "m" * 1_000}, said("x"), {"model": "m" * 1_000}]


def test_a_message_that_was_refused_is_not_known() -> None:
    """Other messages of the refused body are forgotten too."""
    refused = chat(said("fine"), {"role": 1})
    assert (
        outcome(Operation.CHAT, refused) == outcome(Operation.CHAT, refused) == outcome(Operation.CHAT, refused, None)
    )
    assert outcome(Operation.CHAT, refused)[0] == 400


@pytest.mark.parametrize(
    "hostile",
    [
        b'{"role":"user","content":"x","role":"system"}',
        rb'{"role":"user","content":"\ud800"}',
        b'{"role":"user","content":"\xff"}',
        b'{"role":"user","content":"x","n":1e999}',
        b'{"role":"user","content":[{"a":1,"a":2}]}',
        b'{"role":"user","content":NaN}',
        b'{"role":"user","content":"x","d":' + b"[" * 199 + b"]" * 199 + b"}",
    ],
)
def test_a_hostile_message_among_known_ones_is_refused(hostile: bytes) -> None:
    """New messages are validated as strictly as a whole body."""
    known = b'{"role":"user","content":"known"}'
    outcome(Operation.CHAT, b'{"model":"m","messages":[%b]}' % known)
    raw = b'{"model":"m","messages":[%b,%b]}' % (known, hostile)
    status, message, _ = outcome(Operation.CHAT, raw)
    assert (status, message) == outcome(Operation.CHAT, raw, None)[:2]
    assert message.startswith("The body is not valid JSON")


@pytest.mark.parametrize(
    "field", [b'"tools":[{"a":1,"a":2}]', b'"vendor":{"a":{"b":1,"b":2}}', b'"vendor":["\xff"]', b'"seed":1e999']
)
def test_a_hostile_field_beside_known_messages_is_refused(field: bytes) -> None:
    """Fields unknown to the gateway too: the engine reads them."""
    outcome(Operation.CHAT, b'{"model":"m","messages":[{"role":"user"}]}')
    raw = b'{"model":"m","messages":[{"role":"user"}],%b}' % field
    assert outcome(Operation.CHAT, raw)[:2] == outcome(Operation.CHAT, raw, None)[:2]
    assert outcome(Operation.CHAT, raw)[0] == 400


def test_a_tool_definition_is_never_taken_for_a_message() -> None:
    """Digests of definitions and messages are kept apart."""
    message = said("x")
    outcome(Operation.CHAT, chat(message))
    raw = chat(message, functions=message, tools=[message])
    assert outcome(Operation.CHAT, raw) == outcome(Operation.CHAT, raw, None)
