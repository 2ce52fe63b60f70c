"""JSON that is forwarded: read as everybody reads it, or refused."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.strictjson import MAX_DEPTH, BadJson, decode, encode

SCALARS = st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False)
KEYS = st.text(max_size=6) | st.sampled_from(['a":', '"', "a b", "\\", "é\u2028", "😀", ""])
DOCUMENTS = st.recursive(
    SCALARS | KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=15,
)
BLANK = st.text(" \t\r\n", max_size=2)


def reason(data: bytes) -> str:
    with pytest.raises(BadJson) as caught:
        decode(data)
    return str(caught.value)


class Writer:
    """Writes a value as JSON with white space and escapes wherever the grammar allows them."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def write(self, value: Any) -> str:
        if isinstance(value, dict):
            return self._between("{", [self.member(key, item) for key, item in value.items()], "}")
        if isinstance(value, list):
            return self._between("[", [self._spaced(self.write(item)) for item in value], "]")
        return self.string(value) if isinstance(value, str) else json.dumps(value)

    def member(self, key: str, value: Any) -> str:
        return self._spaced(self.string(key)) + ":" + self._spaced(self.write(value))

    def string(self, text: str) -> str:
        escaped = self.draw(st.lists(st.booleans(), min_size=len(text), max_size=len(text)))
        plain = [json.dumps(character, ensure_ascii=False)[1:-1] for character in text]
        return '"' + "".join(_escape(c) if e else p for c, p, e in zip(text, plain, escaped, strict=True)) + '"'

    def _between(self, begin: str, parts: list[str], end: str) -> str:
        return begin + (",".join(parts) or self.draw(BLANK)) + end

    def _spaced(self, text: str) -> str:
        return f"{self.draw(BLANK)}{text}{self.draw(BLANK)}"


def _escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


@settings(deadline=None, max_examples=100)
@given(DOCUMENTS, st.booleans(), st.sampled_from([None, 1]))
def test_a_document_is_read_as_pythons_own_parser_reads_it(value: Any, ascii: bool, indent: int | None) -> None:
    """Value for value and type for type; what is encoded again is the same document."""
    data = json.dumps(value, ensure_ascii=ascii, indent=indent).encode()
    assert repr(decode(data)) == repr(json.loads(data))
    assert repr(json.loads(encode(decode(data)))) == repr(value)


@settings(deadline=None, max_examples=100)
@given(st.data(), DOCUMENTS)
def test_spacing_and_escapes_change_nothing(data: st.DataObject, value: Any) -> None:
    """A document without duplicates is accepted however it is written."""
    assert decode(Writer(data.draw).write(value).encode()) == value


@settings(deadline=None, max_examples=100)
@given(st.data(), KEYS, DOCUMENTS, DOCUMENTS, st.lists(st.booleans(), max_size=4))
def test_a_duplicate_key_is_found_however_it_is_written(
    data: st.DataObject, key: str, one: Any, other: Any, outside: list[bool]
) -> None:
    """In any spacing, escaping, position and depth: two parsers may differ on which of the two counts."""
    writer = Writer(data.draw)
    rest = [writer.member(name, 0) for name in data.draw(st.lists(KEYS.filter(lambda k: k != key), unique=True))]
    members = [writer.member(key, one), *rest, writer.member(key, other)]
    text = "{" + ",".join(data.draw(st.permutations(members))) + "}"
    for in_list in outside:
        text = f"[{text}]" if in_list else "{" + writer.string("x") + f":{text}" + "}"
    assert reason(text.encode()).endswith("appears twice in one object")


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=40) | st.text('{}[]:,"\\u0aAdD8-+.eE tn\n', max_size=30).map(str.encode))
def test_any_bytes_are_a_value_or_a_refusal(data: bytes) -> None:
    """And what is accepted is what Python's own parser accepts."""
    with suppress(BadJson):
        assert repr(decode(data)) == repr(json.loads(data))


def test_text_that_looks_like_a_member_is_not_one() -> None:
    """Counting in the text is only a hint."""
    assert decode(rb'{"a":"{\"a\":1,\"a\":2}"}') == {"a": '{"a":1,"a":2}'}


def test_the_duplicate_is_named_in_few_words() -> None:
    """The caller may have written anything there; it is a line of an error message."""
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
def test_a_refusal_says_why(data: bytes, why: str) -> None:
    """In the caller's terms."""
    assert reason(data) == why


@pytest.mark.parametrize(
    "data",
    [
        b"NaN", b"Infinity", b"-Infinity", b"[1,]", b'{"a":1,}', b"{'a':1}", b"01", b"+1", b".5", b"1.", b'"\x1f"',
        b"// x\n1", b"\xef\xbb\xbf1", "1".encode("utf-16"), "1".encode("utf-32"), b"\x0c1", b"tRue", b'"a',
    ],
)  # fmt: skip
def test_what_is_not_in_the_grammar_is_refused(data: bytes) -> None:
    """RFC 8259, with none of the extensions that Python's own parser has."""
    assert reason(data)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('{"a" : ', "}")])
def test_nesting_is_bounded_by_a_number_and_not_by_the_stack(opening: str, closing: str) -> None:
    """What is accepted here is encoded again later, from deeper in the stack: that must not fail either."""
    deepest = (opening * (MAX_DEPTH - 1) + "1" + closing * (MAX_DEPTH - 1)).encode()
    assert reason(opening.encode() + deepest + closing.encode()) == "it is nested too deeply"
    assert json.loads(_encoded_from_far_below(decode(deepest), 500)) == json.loads(deepest)


def _encoded_from_far_below(value: Any, frames: int) -> bytes:
    return _encoded_from_far_below(value, frames - 1) if frames else encode(value)
