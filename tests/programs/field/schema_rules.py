"""Verifies JSON schemas of tools and of structured answers by the subset that an API takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.programs.field.rules import Violation, table

_UNORDERED = ("anyOf", "oneOf", "allOf")
_NESTED = ("properties", "$defs", "definitions", "patternProperties")


def verify_schema(subset: str, schema: Any, at: str, *, strict: bool = False, answer: bool = False) -> list[Violation]:
    """`strict`: as the caller asks for it. `answer`: the schema is of a structured answer, else of a tool."""
    rules = table()["schemas"].get(subset)
    if rules is None or not isinstance(schema, dict):
        return []
    found = list(_of_root(rules, schema, at))
    for place, part in _parts(schema, at):
        found += _of_part(rules, part, place, answer)
        if strict and rules.get("strict"):
            found += _of_strict_part(rules, part, place)
    return found


def _of_root(rules: Mapping[str, Any], schema: Mapping[str, Any], at: str) -> Iterator[Violation]:
    if rules.get("root") != "object":
        return
    if schema.get("type") != "object":
        yield Violation("schema: root is no object", at, "schema must be a JSON Schema of 'type: \"object\"'")
    for name in _UNORDERED:
        if name in schema:
            message = f"input_schema does not support oneOf, allOf, or anyOf at the top level ({name})"
            yield Violation(f"schema: {name} at the root", at, message)


def _of_part(rules: Mapping[str, Any], part: Mapping[str, Any], at: str, answer: bool) -> Iterator[Violation]:
    for name in sorted(part.keys() & set(rules.get("refuses", ()))):
        yield Violation(f"schema: {name}", at, f"Unknown name \"{name}\" at '{at}': Cannot find field.")
    if rules.get("type_lists") == "refused" and isinstance(part.get("type"), list):
        yield Violation("schema: type as a list", at, f"Proto field is not repeating, cannot start list at '{at}.type'")
    if rules.get("typed") and ".properties." in at and at.rpartition(".")[0].endswith("properties"):
        if not part.keys() & {"type", "$ref", "anyOf"}:
            yield Violation("schema: property without type", at, f"At path '{at}': type is not defined")
        if "anyOf" in part and "type" in part:
            message = f"At path '{at}': when using anyOf, type should be defined in anyOf items instead of the parent"
            yield Violation("schema: type beside anyOf", at, message)
    if rules.get("longest") and type(part.get("maxLength")) is int and part["maxLength"] > rules["longest"]:
        yield Violation("schema: maxLength too large", at, "failed to parse grammar")
    if answer and "closed_formats" in rules:
        yield from _of_structured_part(rules, part, at)


def _of_structured_part(rules: Mapping[str, Any], part: Mapping[str, Any], at: str) -> Iterator[Violation]:
    if part.get("type") == "object" and part.get("additionalProperties") is not False:
        message = (
            "output_config.format.schema: For 'object' type, 'additionalProperties' must be explicitly set to false"
        )
        yield Violation("schema: open object", at, message)
    for name in sorted(part.keys() & set(rules["keep_out"])):
        message = f"output_config.format.schema: For '{part.get('type')}' type, property '{name}' is not supported"
        yield Violation(f"schema: {name}", at, message)
    if part.get("minItems") not in (None, 0, 1):
        yield Violation("schema: minItems", at, "'minItems' values other than 0 or 1 are not supported")
    if "format" in part and part["format"] not in rules["formats"]:
        yield Violation("schema: format", at, f"String format '{part['format']}' is not supported")


def _of_strict_part(rules: Mapping[str, Any], part: Mapping[str, Any], at: str) -> Iterator[Violation]:
    if part.get("type") == "object" or "properties" in part:
        if part.get("additionalProperties") is not False:
            message = "'additionalProperties' is required to be supplied and to be false."
            yield Violation("schema: open object", at, message, "invalid_function_parameters")
        if set(part.get("required", ())) != set(part.get("properties", {})):
            message = "'required' is required to be supplied and to be an array including every key in properties."
            yield Violation("schema: optional property", at, message, "invalid_function_parameters")
    for name in sorted(part.keys() & {"oneOf", "allOf", "default", "not", "if"}):
        yield Violation(f"schema: {name}", at, f"'{name}' is not permitted.", "invalid_function_parameters")
    if part.get("type") == "array" and not part.get("items"):
        yield Violation("schema: untyped items", at, "array schema missing items", "invalid_function_parameters")
    if "format" in part and part["format"] not in rules["formats"]:
        message = f"'{part['format']}' is not a valid format."
        yield Violation("schema: format", at, message, "invalid_function_parameters")


def _parts(schema: Any, at: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(schema, dict):
        return
    yield at, schema
    for name in _NESTED:
        for key, inner in (schema.get(name) or {}).items():
            yield from _parts(inner, f"{at}.{name}.{key}")
    for name in ("items", "additionalProperties", "contains"):
        yield from _parts(schema.get(name), f"{at}.{name}")
    for name in _UNORDERED:
        for number, inner in enumerate(schema.get(name) or ()):
            yield from _parts(inner, f"{at}.{name}.{number}")
