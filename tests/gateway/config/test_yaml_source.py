"""YAML to data with source locations."""

from __future__ import annotations

import pytest

from gateway.config.config_errors import ConfigError, SourceLocation
from gateway.config.yaml_source import merge, parse


def refusal(text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml", environ)
    return str(caught.value)


def data(text: str, **environ: str) -> object:
    return parse(text, "f.yaml", environ).data


def test_scalars_follow_the_core_schema_of_yaml_1_2() -> None:
    """`off` is text, as in editors; `010` is ten."""
    text = "[off, on, yes, true, FALSE, 010, -3, 1.5, 1e3, .5, ~, null, 2024-01-01, 10:30, 0x10, 3%, '7']"
    expected = [
        "off",
        "on",
        "yes",
        True,
        False,
        10,
        -3,
        1.5,
        1000.0,
        0.5,
        None,
        None,
        "2024-01-01",
        "10:30",
        "0x10",
        "3%",
        "7",
    ]
    assert data(f"a: {text}") == {"a": expected}


def test_a_key_is_text() -> None:
    """A model called 4.1 is not a number."""
    assert data("{4.1: a, 7: b, on: c, null: d}") == {"4.1": "a", "7": "b", "on": "c", "null": "d"}


def test_every_value_knows_the_line_of_its_key() -> None:
    """Items of a list have a line each."""
    document = parse("a:\n  b:\n    - 1\n    - c: 2\n", "f.yaml", {})
    lines = {path: place.line for path, place in document.locations.items()}
    assert lines == {(): 0, ("a",): 1, ("a", "b"): 2, ("a", "b", 0): 3, ("a", "b", 1): 4, ("a", "b", 1, "c"): 4}


def test_a_missing_key_has_the_location_of_its_mapping() -> None:
    """The location of a missing key is the location of the mapping without the key."""
    assert parse("a:\n  b: 1\n", "f.yaml", {}).location(("a", "c", 0)) == SourceLocation("f.yaml", 1)


def test_anchors_and_merge_keys_work() -> None:
    """Written keys win over merged keys, an earlier source over a later source."""
    text = "x: &x {a: 1, b: 1}\ny: &y {b: 2, c: 2}\nz: {<<: [*x, *y], a: 0}\nw: {<<: *y}\nv: *x\n"
    expected = {"z": {"a": 0, "b": 1, "c": 2}, "w": {"b": 2, "c": 2}, "v": {"a": 1, "b": 1}}
    assert {key: value for key, value in parse(text, "f", {}).data.items() if key in expected} == expected


def test_variables_are_replaced_in_text() -> None:
    """Unset or empty takes the default; `$$` and a lone `$` are dollar signs."""
    text = "a: ${X}-${Y:-y}-${E:-e}\nb: $$X and $5\nc: '${N:-}'\nd: $${X}"
    assert data(text, X="x", E="") == {"a": "x-y-e", "b": "$X and $5", "c": "", "d": "${X}"}


def test_a_replaced_value_stays_text() -> None:
    """A key of digits stays text, and is never parsed as YAML."""
    assert data("a: ${X}\nb: ${Y}", X="010", Y="{c: 1}") == {"a": "010", "b": "{c: 1}"}


def test_the_written_form_of_a_replaced_value_is_kept() -> None:
    """Messages show the written form in place of the secret."""
    assert parse("a: {b: 'Bearer ${X}'}", "f", {"X": "s3cret"}).raw == {("a", "b"): "Bearer ${X}"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {}\na: 2", "f.yaml:3: a: duplicate key, first on line 1"),
        ("a: {b: 1, b: 2}", "f.yaml:1: a.b: duplicate key, first on line 1"),
        ("a: [", "f.yaml:1:5: not YAML: expected the node content, but found '<stream end>'"),
        (
            "a: b: c",
            "f.yaml:1:5: not YAML: mapping values are not allowed here; "
            "the line before lacks its colon, or text with a colon its quotes",
        ),
        ("a:\n\tb: 1", "f.yaml:2:1: not YAML: a tab; indent with spaces"),
        ("a: *x", "f.yaml:1:4: not YAML: found undefined alias 'x'"),
        ("---\na: 1\n---\nb: 2", "f.yaml:3:1: not YAML: a second document; write one per file"),
        ("a: 1\nb: \x01", "f.yaml:2: not YAML: the character U+0001"),
        ("- a", "f.yaml:1: expected sections such as pools: and routes:"),
        ("a: !foo 1", "f.yaml:1: a: unsupported tag !foo"),
        ("a: !!python/name:os.system", "f.yaml:1: a: unsupported tag !!python/name:os.system"),
        ("a: !!int x", "f.yaml:1: a: 'x' does not match the tag !!int"),
        ("? [a]\n: 1", "f.yaml:1: a key must be a name"),
        ("a: &a [*a]", "f.yaml:1: a[0]: an alias that contains itself"),
        ("a: {<<: 3}", "f.yaml:1: a: << takes a mapping, or a list of them"),
        ("a:\n  b: ${X}", "f.yaml:2: a.b: the environment variable X is not set; set it, or write ${X:-default}"),
        ("a: ${X", "f.yaml:1: a: '${X' is not ${NAME} or ${NAME:-default}; write $$ for a dollar sign"),
        ("a: ${1X}", "f.yaml:1: a: '${1X}' is not ${NAME} or ${NAME:-default}; write $$ for a dollar sign"),
    ],
)
def test_invalid_yaml_is_refused(text: str, message: str) -> None:
    """A single line with the location and the mistake."""
    assert refusal(text) == message


def test_every_problem_of_a_file_is_reported() -> None:
    """A line per problem, in the order of the file."""
    assert refusal("a: ${X}\nb: !foo 1\nb: 2").splitlines() == [
        "f.yaml:1: a: the environment variable X is not set; set it, or write ${X:-default}",
        "f.yaml:2: b: unsupported tag !foo",
        "f.yaml:3: b: duplicate key, first on line 2",
    ]


def test_an_empty_file_is_an_empty_mapping() -> None:
    """An empty file can be merged with other files."""
    assert data("# only a comment\n") == {}


def test_mappings_are_merged_and_lists_are_replaced() -> None:
    """A later file replaces the named keys and keeps the rest."""
    under = parse("a: {b: 1, c: [1, 2, 3]}\nd: 4", "one", {})
    over = parse("\na: {c: [9], e: 5}", "two", {})
    merged = merge(under, over)
    assert merged.data == {"a": {"b": 1, "c": [9], "e": 5}, "d": 4}
    assert [str(merged.location(path)) for path in [("a", "b"), ("a", "c"), ("a", "c", 2), ("d",)]] == [
        "one:1",
        "two:2",
        "two:2",
        "one:2",
    ]


def test_a_replaced_value_drops_its_written_form() -> None:
    """A message about the new value must not show the old variable."""
    merged = merge(parse("a: {k: '${X}'}", "one", {"X": "x"}), parse("a: {k: y}", "two", {}))
    assert (merged.data, merged.raw) == ({"a": {"k": "y"}}, {})
