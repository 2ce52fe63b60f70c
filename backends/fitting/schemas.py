"""Fits JSON schemas of tools and answers to the subset that a server accepts.

- Objects get `additionalProperties: false` if the server requires it, and the root is an object.
- Refused keywords and formats move into the description, which the model reads.
- Requirements of `strict` that change a schema's meaning (every property required) are not applied: `strict` is
  removed, and the loss noted.
- Alternatives at the root are merged into one object; a property is required if all alternatives require it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from backends.facts.model_facts import SchemaRules
from backends.fitting.target import SCHEMA_OF_ANSWER, SCHEMA_OF_TOOL, Target
from backends.interface import Operation
from backends.member_paths import ABSENT, Json, Path, altered, opened, put, value_at
from backends.translation.omissions import Omissions
from backends.translation.request_members import refuse

RulesOf = Callable[[str], SchemaRules]

_MAPS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")  # names to schemas
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_ROOT_UNIONS = ("anyOf", "oneOf", "allOf")
_UNTOLD = ("$schema", "title", "default", "additionalProperties")  # say nothing that an answer could miss
_encode = msgspec.json.Encoder(order="sorted").encode


_FORM_OF_ANSWER: Mapping[Operation, Path] = {
    Operation.CHAT: ("response_format", "type"),
    Operation.MESSAGES: ("output_config", "format", "type"),
    Operation.RESPONSES: ("text", "format", "type"),
}


def fit_form(body: Json, target: Target, told: Omissions) -> Json:
    """The form of the answer, which is meant: a server without it is not asked."""
    facts, path = target.facts, _FORM_OF_ANSWER[target.operation]
    form = value_at(body, path)
    if (form == "json_schema" and facts.json_schema) or (form == "json_object" and facts.json_object):
        return body
    if form not in ("json_schema", "json_object"):
        return body
    refuse(".".join(path[:-1]), told, f"the server has no answers of the form {form}")
    return put(body, path[:-1], ABSENT)


def fit_schemas(body: Json, target: Target, told: Omissions, rules_of: RulesOf) -> Json:
    facts, operation = target.facts, target.operation
    path = SCHEMA_OF_TOOL[operation]
    if body.get("tools") and (facts.schema or facts.strict_schema):
        written = opened(body["tools"])
        given = [opened(tool) for tool in written]
        tools = [_fit_tool(tool, path[1:], target, told, rules_of) for tool in given]
        changed = [new is not old for new, old in zip(tools, given, strict=True)]
        if any(changed):
            choice = zip(changed, tools, written, strict=True)
            body = {**body, "tools": [tool if is_new else same for is_new, tool, same in choice]}
    if facts.strict_schema:
        body = _fit_answer(body, SCHEMA_OF_ANSWER[operation], target, told, rules_of)
    return body


def _fit_tool(tool: Any, path: tuple[str, ...], target: Target, told: Omissions, rules_of: RulesOf) -> Any:
    if not isinstance(tool, Mapping) or value_at(tool, path) is None:
        return tool
    facts, name = target.facts, ".".join(("tools", *path))
    strict = (*path[:-1], "strict")
    if value_at(tool, strict) is True and facts.strict_schema:
        rules = rules_of(facts.strict_schema)
        if not _is_loose(value_at(tool, path), rules):
            return altered(tool, path, partial(_fit_told, rules=rules, name=name, told=told))
        told.leave_out(".".join(("tools", *strict)))
        tool = put(dict(tool), strict, False)
    if not facts.schema:
        return tool
    return altered(tool, path, partial(_fit_told, rules=rules_of(facts.schema), name=name, told=told))


def _fit_answer(body: Json, path: tuple[str, ...], target: Target, told: Omissions, rules_of: RulesOf) -> Json:
    schema = value_at(body, path)
    if not isinstance(schema, Mapping):
        return body
    rules = rules_of(target.facts.strict_schema)
    strict = (*path[:-1], "strict")
    if target.operation is not Operation.MESSAGES:
        if value_at(body, strict) is not True and rules.all_required:
            return body
        if _is_loose(schema, rules):
            told.leave_out(".".join(strict))
            return put(body, strict, False)
    found: Json = altered(body, path, partial(_fit_told, rules=rules, name=".".join(path), told=told))
    return found


def _is_loose(schema: Any, rules: SchemaRules) -> bool:
    """True if the rules would change the schema's meaning: optional properties, or objects with arbitrary members."""
    if not isinstance(schema, Mapping):
        return isinstance(schema, list) and any(_is_loose(each, rules) for each in schema)
    properties = schema.get("properties")
    if rules.all_required and isinstance(properties, Mapping) and properties.keys() - set(schema.get("required") or ()):
        return True
    extra = schema.get("additionalProperties")
    if rules.all_required and (extra is True or isinstance(extra, Mapping)):
        return True
    return any(_is_loose(each, rules) for each in schema.values() if isinstance(each, Mapping | list))


def _fit_told(schema: Any, rules: SchemaRules, name: str, told: Omissions) -> Any:
    lost: set[str] = set()
    found = fit_schema(schema, rules, lost)
    if lost:
        told.leave_out(name)
    return found


# -- one schema ----------------------------------------------------------------------------------------


def fit_schema(schema: Any, rules: SchemaRules, lost: set[str]) -> Any:
    """Fit a schema to the rules; the same object if unchanged. `lost`: receives keywords no longer enforced."""
    if not isinstance(schema, Mapping):
        return schema
    found = _fit(schema, rules, lost)
    root = _fit_root(found, rules, lost)
    return schema if root == schema else root


def _fit_root(schema: Json, rules: SchemaRules, lost: set[str]) -> Json:
    for union in _ROOT_UNIONS:
        if union in rules.root_without and isinstance(schema.get(union), list):
            schema = _joined(schema, union)
            lost.add(union)
    others = {word: schema[word] for word in rules.root_without if word in schema}
    if others:
        schema = _described({name: value for name, value in schema.items() if name not in others}, others)
        lost.update(others)
    if rules.root_object and "$ref" not in schema:
        schema = {**schema, "type": "object", "properties": schema.get("properties") or {}}
        if rules.closed:
            schema["additionalProperties"] = False
    return schema


def _joined(schema: Json, union: str) -> Json:
    """Alternatives, or parts, at the root as one object."""
    branches = [each for each in schema[union] if isinstance(each, Mapping)]
    properties: Json = {}
    for branch in (*branches, schema):
        properties.update(branch.get("properties") or {})
    required = [set(branch.get("required") or ()) for branch in branches]
    shared = (
        set.union(*required) if union == "allOf" and required else set.intersection(*required) if required else set()
    )
    names = [name for name in properties if name in shared | set(schema.get("required") or ())]
    found = {name: value for name, value in schema.items() if name != union}
    return {**found, "type": "object", "properties": properties, **({"required": names} if names else {})}


def _fit(schema: Mapping[str, Any], rules: SchemaRules, lost: set[str]) -> Json:
    found: Json = {}
    words: Json = {}  # keywords for the description
    for name, value in schema.items():
        if _is_refused(name, value, rules):
            words[name] = value
        else:
            found[name] = _fit_value(name, value, rules, lost)
    if rules.one_of_as_any_of and "oneOf" in found:
        found["anyOf"] = found.pop("oneOf") if "anyOf" not in found else [*found["anyOf"], *found.pop("oneOf")]
    said = {name: value for name, value in words.items() if name not in _UNTOLD}
    lost.update(said)
    found = _described(found, said)
    return _typed(_closed(found, rules), rules)


def _is_refused(name: str, value: Any, rules: SchemaRules) -> bool:
    if name == "minItems" and rules.most_min_items is not None:
        return type(value) is not int or value > rules.most_min_items
    if name == "format" and rules.formats is not None:
        return value not in rules.formats
    if name == "$ref" and rules.local_refs:
        return not str(value).startswith("#/$defs/")
    return name in rules.refused


def _fit_value(name: str, value: Any, rules: SchemaRules, lost: set[str]) -> Any:
    if name in _MAPS and isinstance(value, Mapping):
        return {key: _fit(each, rules, lost) if isinstance(each, Mapping) else each for key, each in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [_fit(each, rules, lost) if isinstance(each, Mapping) else each for each in value]
    if name in _SINGLE and isinstance(value, Mapping):
        return _fit(value, rules, lost)
    return value


def _described(schema: Json, words: Mapping[str, Any]) -> Json:
    """The schema, with keywords in its description."""
    if not words:
        return schema
    text = ", ".join(f"{name}: {_encode(value).decode()}" for name, value in words.items())
    description = schema.get("description")
    return {**schema, "description": f"{description} ({text})" if description else text}


def _closed(schema: Json, rules: SchemaRules) -> Json:
    is_object = schema.get("type") == "object" or "properties" in schema
    return {**schema, "additionalProperties": False} if rules.closed and is_object else schema


def _typed(schema: Json, rules: SchemaRules) -> Json:
    kind = schema.get("type")
    if not rules.type_lists and isinstance(kind, list):
        kinds = [each for each in kind if each != "null"]
        if len(kinds) == 1:
            schema = {**schema, "type": kinds[0]}
        else:
            untyped = {name: value for name, value in schema.items() if name != "type"}
            schema = {**untyped, "anyOf": [{"type": each} for each in kinds]}
        if "null" in kind:
            schema["nullable"] = True
    if not rules.typed_properties or not isinstance(schema.get("properties"), Mapping):
        return schema
    return {**schema, "properties": {name: _with_type(each) for name, each in schema["properties"].items()}}


def _with_type(schema: Any) -> Any:
    """A property with a type; beside `anyOf` the type stands in the alternatives."""
    if not isinstance(schema, Mapping) or "$ref" in schema:
        return schema
    if isinstance(schema.get("anyOf"), list):
        kind = schema.get("type")
        rest = {name: value for name, value in schema.items() if name not in ("type", "anyOf")}
        return {**rest, "anyOf": [{**({"type": kind} if kind else {}), **each} for each in schema["anyOf"]]}
    if "type" in schema:
        return schema
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return {"type": _TYPES.get(type(values[0]), "string") if values else _guessed(schema), **schema}


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def _guessed(schema: Mapping[str, Any]) -> str:
    return "object" if "properties" in schema else "array" if "items" in schema else "string"
