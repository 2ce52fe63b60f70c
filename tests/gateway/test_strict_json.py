"""Strict JSON: a value on which all parsers agree, or an error."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from gateway import strict_json
from gateway.strict_json import (
    MAX_DEPTH,
    MAX_MEMBERS,
    MAX_VALUES,
    UNREADABLE,
    BadJson,
    decode,
    element,
    encode,
    members,
    too_many_elements,
)
from tests.support.json_texts import Writer

SCALARS = st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False)
KEYS = st.text(max_size=6) | st.sampled_from(['a":', '"', "a b", "\\", "é\u2028", "😀", ""])
DOCUMENTS = st.recursive(
    SCALARS | KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=15,
)


def reason(data: bytes) -> str:
    with pytest.raises(BadJson) as caught:
        decode(data)
    return str(caught.value)


# --------------------------------------------------------------------------- the number of elements


def counted(value: Any) -> tuple[int, int]:
    """Objects, arrays and members; commas between values."""
    inner = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        return 0, 0
    below = [counted(each) for each in inner]
    own = 1 + (len(inner) if isinstance(value, dict) else 0)
    return own + sum(members for members, _ in below), max(len(inner) - 1, 0) + sum(commas for _, commas in below)


@settings(deadline=None, max_examples=100)
@given(DOCUMENTS, st.booleans(), st.integers(1, 9))
def test_elements_are_counted_outside_of_strings(value: Any, ascii: bool, part: int) -> None:
    """Exactly, and wherever the parts are cut."""
    data = json.dumps(value, ensure_ascii=ascii).encode()
    with patch.object(strict_json, "_PART", part):
        outside = b"".join(strict_json._without_strings(data))
    members, commas = counted(value)
    assert (sum(map(outside.count, (b"{", b"[", b":"))), outside.count(b",")) == (members, commas)


MANY_MEMBERS = {
    "arrays": b"[" + b",".join([b"[]"] * MAX_MEMBERS) + b"]",
    "nested arrays": b"[" + b",".join([b"[" * 100 + b"]" * 100] * (MAX_MEMBERS // 100)) + b"]",
    "members": b"{" + b",".join(b'"%d":1' % n for n in range(MAX_MEMBERS)) + b"}",
    "messages": b"[" + b" , ".join([b'{"role" : "user", "content":"x"}'] * (MAX_MEMBERS // 3)) + b"]",
    "strings": b"[" + b",".join([b'"\\\\"'] * (MAX_VALUES + 1)) + b"]",
    "numbers": b"[" + b" , ".join([b"1"] * (MAX_VALUES + 1)) + b"]",
}


@pytest.mark.parametrize("name", MANY_MEMBERS)
def test_too_many_elements_are_found_in_any_form(name: str) -> None:
    data = MANY_MEMBERS[name]
    assert too_many_elements(data)
    kept = data.rpartition(b" , " if b" , " in data else b",")[0] + (b"}" if name == "members" else b"]")
    assert not too_many_elements(kept)
    assert decode(kept)


@pytest.mark.parametrize(
    "data",
    [
        encode(["a, b: {c} [d] \\" * 100_000, 'say "hi", "ho", ' * 100_000]),
        encode(list(range(MAX_VALUES))),
        encode([{"role": "user", "content": [{"type": "text", "text": "x"}] * 3}] * 4_000),
    ],
    ids=["text", "token ids", "a long conversation"],
)
def test_text_token_ids_and_long_conversations_are_no_attack(data: bytes) -> None:
    assert not too_many_elements(data)


# --------------------------------------------------------------------------- documents


@settings(deadline=None, max_examples=100)
@given(DOCUMENTS, st.booleans(), st.sampled_from([None, 1]))
def test_a_document_decodes_like_pythons_json(value: Any, ascii: bool, indent: int | None) -> None:
    """In value and type; encoding gives the same document."""
    data = json.dumps(value, ensure_ascii=ascii, indent=indent).encode()
    assert repr(decode(data)) == repr(json.loads(data))
    assert repr(json.loads(encode(decode(data)))) == repr(value)


@settings(deadline=None, max_examples=100)
@given(st.data(), DOCUMENTS)
def test_spacing_and_escapes_change_nothing(data: st.DataObject, value: Any) -> None:
    """A document without duplicates is accepted in any form."""
    assert decode(Writer(data.draw).write(value).encode()) == value


@settings(deadline=None, max_examples=100)
@given(st.data(), KEYS, DOCUMENTS, DOCUMENTS, st.lists(st.booleans(), max_size=4))
def test_a_duplicate_key_is_found_in_any_form(
    data: st.DataObject, key: str, one: Any, other: Any, outside: list[bool]
) -> None:
    """In any spacing, escaping, position and depth: parsers differ in the value that counts."""
    writer = Writer(data.draw)
    rest = [writer.member(name, 0) for name in data.draw(st.lists(KEYS.filter(lambda k: k != key), unique=True))]
    members = [writer.member(key, one), *rest, writer.member(key, other)]
    text = "{" + ",".join(data.draw(st.permutations(members))) + "}"
    for in_list in outside:
        text = f"[{text}]" if in_list else "{" + writer.string("x") + f":{text}" + "}"
    assert reason(text.encode()).endswith("appears twice in one object")


@settings(deadline=None, max_examples=100)
@given(st.data(), DOCUMENTS)
def test_exactly_the_documents_with_duplicate_keys_are_refused(data: st.DataObject, value: Any) -> None:
    """With any text in strings: colons, literal or escaped, are no members."""
    writer = Writer(data.draw, twice=True)
    text = writer.write(value).encode()
    if writer.doubled:
        assert reason(text).endswith("appears twice in one object")
    else:
        assert decode(text) == value


@pytest.mark.parametrize(
    "text",
    [
        rb'{"a":1,"a":2,"b":"\u003a"}',
        rb'{"a":1,"a":2,"b":"\u003A:"}',
        rb'{"a:":"\u003a","a:":2}',
        rb'{"x":[{"a":1,"\u0061":2},"::::","\u003a"]}',
    ],
)
def test_an_escaped_colon_does_not_hide_a_member(text: bytes) -> None:
    """Members are counted by colons: an escaped colon must not hide a lost member."""
    assert reason(text).endswith("appears twice in one object")


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=40) | st.text('{}[]:,"\\u0aAdD8-+.eE tn\n', max_size=30).map(str.encode))
def test_any_bytes_are_a_value_or_a_refusal(data: bytes) -> None:
    """Accepted values equal those of Python's own parser."""
    with suppress(BadJson):
        assert repr(decode(data)) == repr(json.loads(data))


def test_text_that_looks_like_a_member_is_text() -> None:
    """Counting colons is only a hint."""
    assert decode(rb'{"a":"{\"a\":1,\"a\":2}"}') == {"a": '{"a":1,"a":2}'}


def test_an_error_message_repeats_a_bounded_key() -> None:
    """Keys are the caller's text, in a line of an error message."""
    assert reason(b'{"model":1,"model":2}') == 'the key "model" appears twice in one object'
    assert len(reason(b'{"%b":1,"%b":2}' % (b"k" * 10_000, b"k" * 10_000))) < 150


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (b'"\xff\xfe"', "it is not valid UTF-8"),
        (b'"\\ud800"', "a string holds a lone surrogate or a broken escape"),
        (b'{"a":"\\uDC00x"}', "invalid utf-16 surrogate pair (byte 12)"),
        (b"[" * 100_000 + b"]" * 100_000, "it is nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "it is nested too deeply"),
        (b'{"a" : ' * 5_000 + b"1" + b"}" * 5_000, "it is nested too deeply"),
        (b"1e999", "Number out of range"),
        (b"-" + b"1" * 5_000, "Integer value out of range"),
        (b"[1] x", "trailing characters (byte 5)"),
    ],
)
def test_an_error_names_its_cause(data: bytes, why: str) -> None:
    """In the caller's terms."""
    assert reason(data) == why


@pytest.mark.parametrize(
    "data",
    [
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"[1,]",
        b'{"a":1,}',
        b"{'a':1}",
        b"01",
        b"+1",
        b".5",
        b"1.",
        b'"\x1f"',
        b"// x\n1",
        b"\xef\xbb\xbf1",
        "1".encode("utf-16"),
        "1".encode("utf-32"),
        b"\x0c1",
        b"tRue",
        b'"a',
    ],
)
def test_text_outside_the_json_grammar_is_refused(data: bytes) -> None:
    """RFC 8259, without the extensions of Python's own parser."""
    assert reason(data)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('{"a" : ', "}")])
def test_nesting_is_bounded_by_a_number_and_not_by_the_stack(opening: str, closing: str) -> None:
    """Accepted values can be encoded later, deeper in the stack."""
    deepest = (opening * (MAX_DEPTH - 1) + "1" + closing * (MAX_DEPTH - 1)).encode()
    assert reason(opening.encode() + deepest + closing.encode()) == "it is nested too deeply"
    assert json.loads(_encoded_from_far_below(decode(deepest), 500)) == json.loads(deepest)


@pytest.mark.parametrize("inner", ["[]", "{}", "1", "[1, null]", '["x"]', '["x", 1]', '{"a": 1.5}'])
def test_every_level_of_nesting_counts(inner: str) -> None:
    """Scalars too; the last level may be empty."""
    depth = {"[]": 1, "{}": 1, "1": 1}.get(inner, 2)
    wrapped = "[" * (MAX_DEPTH - depth) + inner + "]" * (MAX_DEPTH - depth)
    assert decode(wrapped.encode()) is not None
    assert reason(f"[{wrapped}]".encode()) == "it is nested too deeply"


def _encoded_from_far_below(value: Any, frames: int) -> bytes:
    return _encoded_from_far_below(value, frames - 1) if frames else encode(value)


# --------------------------------------------------------------------------- partial decoding


@settings(deadline=None, max_examples=100)
@given(st.data(), st.dictionaries(KEYS, DOCUMENTS, max_size=4))
def test_members_decodes_one_level_and_keeps_raw_elements(data: st.DataObject, value: dict[str, Any]) -> None:
    """Encoding gives the same document."""
    writer = Writer(data.draw)
    found = members(writer.write(value).encode())
    assert list(found) == list(value)
    assert decode(encode(found)) == value
    for name, inner in found.items():
        within = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
        assert all(isinstance(each, Raw) for each in within)
        assert isinstance(inner, dict | list) or repr(inner) == repr(decode(encode(inner))) == repr(value[name])


@settings(deadline=None, max_examples=100)
@given(st.data(), DOCUMENTS)
def test_partial_decoding_accepts_the_same_documents(data: st.DataObject, value: Any) -> None:
    """Bodies forwarded in parts are validated as strictly as decoded bodies."""
    text = bytearray(Writer(data.draw, twice=True).write({"a": [value], "b": {"c": value}, "d": value}).encode())
    for _ in range(data.draw(st.integers(0, 2))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from(b'{}[]:,"\\ua0\xff\x1f1-.eN '))
    whole = parts = None
    with suppress(BadJson):
        whole = decode(bytes(text))
    with suppress(*UNREADABLE):
        parts = _in_parts(members(bytes(text)))
    assert repr(parts) == repr(whole if isinstance(whole, dict) else None)


def _in_parts(found: dict[str, Any]) -> dict[str, Any]:
    for name, value in found.items():
        if isinstance(value, list):
            found[name] = [element(each, MAX_DEPTH - 2) for each in value]
        elif isinstance(value, dict):
            found[name] = {key: element(each, MAX_DEPTH - 2) for key, each in value.items()}
    return found


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"a":2}',
        rb'{"a":[1],"\u0061":2}',
        b'{"a":{"b":1,"b":[2]}}',
        b"[1]",
        b"1",
        b'"x"',
        b"null",
        b"",
        b'{"a":"\xff"}',
        rb'{"a":"\ud800"}',
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'{"a":[1,]}',
        b'{"a":1}x',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_members_refuses_errors_of_its_own_level(text: bytes) -> None:
    """Duplicate keys at either level, scalars, framing, and documents other than objects."""
    with pytest.raises(UNREADABLE):
        members(text)


@pytest.mark.parametrize(
    "text", [b'{"a":1,"a":2}', b'{"a":[{"b":1,"b":2}]}', b'["\xff"]', b"1e999", b"1" * 5_000, rb'{"a":"\udc00"}']
)
def test_an_element_is_validated_like_a_document(text: bytes) -> None:
    """Framing alone would accept these."""
    (found,) = members(b'{"x":[' + text + b"]}")["x"] if b"udc00" not in text else (Raw(text),)
    with pytest.raises(BadJson):
        element(found, MAX_DEPTH)


def test_the_depth_of_an_element_is_bounded() -> None:
    """Levels above the element count too."""
    deepest = Raw(b"[" * 10 + b"]" * 10)
    assert element(deepest, 10)
    with pytest.raises(BadJson, match="nested too deeply"):
        element(deepest, 9)
