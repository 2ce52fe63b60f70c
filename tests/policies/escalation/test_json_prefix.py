"""The beginning of a JSON document, cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.escalation.json_prefix import may_begin_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
SPELLINGS: list[dict[str, Any]] = [{}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}]


@given(VALUES, st.sampled_from(SPELLINGS), st.floats(0, 1))
def test_the_beginning_of_every_document_is_accepted(value: Any, spelling: dict[str, Any], share: float) -> None:
    """In every spelling of `json`, cut at every share of its length."""
    written = json.dumps(value, **spelling)
    assert may_begin_json(written[: round(share * len(written))])
    assert may_begin_json(f"\r\n\t {written} \n")


@pytest.mark.parametrize(
    "written", ['{"a\\u00e9":[1.5e-7,-0,true,{"b":null}],"c":"\\"x\\\\"}', "[[],{},0.1E+2]", '"\\n']
)
def test_every_cut_is_accepted(written: str) -> None:
    for end in range(len(written) + 1):
        assert may_begin_json(written[:end]), written[:end]


@given(VALUES, st.data())
def test_a_document_with_another_character_is_accepted_only_up_to_that(value: Any, data: st.DataObject) -> None:
    """A control character stands nowhere in JSON but between its parts."""
    written = json.dumps(value)
    at = data.draw(st.integers(0, len(written)))
    assert not may_begin_json(written[:at] + "\x01")


@pytest.mark.parametrize(
    "text",
    [
        *("Sure", "Here is {}", "```json\n{", "// a\n{", "True", "nul1", "undefined", "NaN"),
        *('{"a":1} Here', "1 2", "true false", '{"a":1}}', "[]]", "{} {"),
        *("[1,]", "[,", "{,", '{"a":}', '{"a":1,}', '{"a" 1', "[1 2", "[}", "]", "{a:1}", "{'a'", "{1:"),
        *("01", "+1", "- ", "1.,", "[1.]", "[-]", "[1e]", ".5"),
        *('"\\x', '"a\nb"', '"\\u12g'),
    ],
)
def test_what_begins_no_document_is_refused(text: str) -> None:
    assert not may_begin_json(text)
