"""The configuration in its written form: durations as text, tiers as names.

`schema`: the JSON Schema, generated from the models; forms that input validators accept beyond the fields are added.
`messages`: pydantic errors as path, expected value, actual value.

Rules of messages:
- Paths are those of the file: names of models and of union branches do not appear.
- Actual values are quoted as written in the file, so secrets from the environment stay hidden.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import ErrorDetails, core_schema

from gateway.config.config_errors import (
    REMOVED,
    SECRET_LENGTH,
    Path,
    Problem,
    as_list,
    as_mapping,
    as_share,
    joined_value,
    nearest,
    unknown_key,
)
from gateway.config.models import Config
from gateway.config.yaml_source import Document

_SECRETS = frozenset(
    {"api_key", "api_keys", "headers", "sha256", "redis", "cache_secret", "admin_key", "query", "proxy"}
)
_HOLDING = frozenset({"keys", "state", "pools"})  # text in place of a mapping there is probably a secret
_TYPES = {
    "an integer": "int_type int_parsing int_from_float",
    "a number": "float_type float_parsing finite_number",
    "true or false": "bool_type bool_parsing",
    "text (in quotes)": "string_type",
    "a list": "tuple_type list_type frozen_set_type",
    "a mapping": "mapping_type dict_type model_type model_attributes_type",
}
_EXPECTED = {kind: expected for expected, kinds in _TYPES.items() for kind in kinds.split()}
_MISFITS = frozenset({*_EXPECTED, "literal_error"})  # the value has the wrong type
_BOUNDS = {
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
}
_VARIABLE = {"type": "string", "pattern": r"\$\{", "description": "${NAME} or ${NAME:-default}, from the environment"}
# Models with a plain text form.
BARE: dict[str, dict[str, Any]] = {
    "Tier": {"type": "string", "description": "the name of a pool"},
    "External": {"type": ["string", "number"], "pattern": r"^\s*\d+(\.\d+)?\s*%?\s*$", "description": "a share: 2%"},
    "EndpointSection": {"type": "string", "pattern": "^https?://", "description": "the URL of a server"},
}


class _AsWritten(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Omits section and null defaults, which pydantic shows in validated form."""
        generated = super().default_schema(schema)
        if not isinstance(generated.get("default"), (str, int, float)):
            generated.pop("default", None)
        return generated

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Adds the descriptions of the fields."""
        generated = super().model_schema(schema)
        fields = generated.get("properties", {})
        for name, text in descriptions(schema["cls"]).items():
            if name in fields:
                fields[name]["description"] = text
        return generated


@cache
def schema(kind: type[Config] = Config) -> dict[str, Any]:
    """JSON Schema, draft 2020-12. Cached: callers must not change the result."""
    generated = kind.model_json_schema(schema_generator=_AsWritten)
    models = generated["$defs"]
    models["Route"]["properties"].pop("name")
    models["EndpointSection"].pop("required")  # a url, or kubernetes
    endpoints = models["PoolSection"]["properties"]["endpoints"]
    endpoints |= {"type": ["array", "object"], "required": ["kubernetes"]}  # a list, or the pods of one service
    endpoints["properties"] = {"kubernetes": {"$ref": "#/$defs/PodsSection"}}
    for name, bare in BARE.items():
        models[name] = {"anyOf": [bare, models[name]]}
    generated = _with_variables(generated)
    generated["$defs"]["Variable"] = _VARIABLE
    generated["patternProperties"] = {"^x-": {"description": "Yours: a place for anchors, ignored."}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **generated, "title": "firsttoken"}


def keys_at(document: dict[str, Any], path: Path) -> list[str]:
    """Allowed keys of the mapping at `path`."""
    return [key for node in _nodes_at(document, path) for key in node.get("properties", {})]


@cache
def places(kind: type[Config] = Config) -> dict[str, list[str]]:
    """Sections that have a key, by the name of the key."""
    found: dict[str, list[str]] = {}
    _collect(schema(kind), schema(kind), "", found)
    return found


def _collect(node: Any, document: dict[str, Any], path: str, found: dict[str, list[str]]) -> None:
    for option in _alternatives(node, document):
        for key, inner in option.get("properties", {}).items():
            if path and path not in found.setdefault(key, []):
                found[key].append(path)
            _collect(inner, document, f"{path}.{key}" if path else key, found)
        _collect(option.get("additionalProperties"), document, f"{path}.NAME", found)
        _collect(option.get("items"), document, f"{path}[]", found)


def words_at(document: dict[str, Any], path: Path) -> list[str]:
    """Allowed literals at `path`, such as `off`."""
    return [node["const"] for node in _nodes_at(document, path) if "const" in node]


def _nodes_at(document: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    nodes = _alternatives(document, document)
    for part in path:
        inner = [
            node.get("items")
            if isinstance(part, int)
            else node.get("properties", {}).get(part, node.get("additionalProperties"))
            for node in nodes
        ]
        nodes = [alternative for node in inner for alternative in _alternatives(node, document)]
    return nodes


def _with_variables(node: Any) -> Any:
    """Allows a variable in place of every value that is not free text."""
    if isinstance(node, list):
        return [_with_variables(item) for item in node]
    if not isinstance(node, dict):
        return node
    kind, narrowed = node.get("type"), not node.keys().isdisjoint({"pattern", "enum", "const"})
    if kind in ("integer", "number", "boolean") or (kind == "string" and narrowed):
        outer = {key: node[key] for key in ("description", "default") if key in node}
        inner = {key: value for key, value in node.items() if key not in outer}
        return {"anyOf": [inner, {"$ref": "#/$defs/Variable"}], **outer}
    return {key: _with_variables(value) for key, value in node.items()}


def _alternatives(node: Any, document: dict[str, Any]) -> list[dict[str, Any]]:
    if not isinstance(node, dict):
        return []
    if "$ref" in node:
        return _alternatives(document["$defs"][node["$ref"].rpartition("/")[2]], document)
    if "anyOf" in node:
        return [found for option in node["anyOf"] for found in _alternatives(option, document)]
    return [node]


# ---------------------------------------------------------------- error messages


@dataclass(frozen=True, slots=True)
class _Fault:
    """A pydantic error with a path in the file. `union`: path of the union with the failed branch, if any. `kind`: the
    configuration with the keys that are known."""

    error: ErrorDetails
    path: Path
    union: Path | None
    kind: type[Config]

    @property
    def siblings(self) -> list[str]:
        """Known keys in the section of `path`."""
        return keys_at(schema(self.kind), self.path[:-1])


def messages(errors: Sequence[ErrorDetails], document: Document, kind: type[Config] = Config) -> list[Problem]:
    """The problems of `document`, without duplicates. The faults of a union's branches follow all others."""
    faults = [_located(error, document.data, kind) for error in errors]
    # pydantic also reports a list with invalid items as too short
    faults = [fault for fault in faults if fault.error["type"] != "too_short" or not _at(document.data, fault.path)]
    found = [_problem(fault, document) for fault in faults if fault.union is None]
    for union in dict.fromkeys(fault.union for fault in faults if fault.union is not None):
        found += _branches(union, [fault for fault in faults if fault.union == union], document)
    return list(dict.fromkeys(found))


def _located(error: ErrorDetails, data: Any, kind: type[Config]) -> _Fault:
    """Removes the parts of the location that pydantic adds: the name of a union branch, `[key]`."""
    path: Path = ()
    union: Path | None = None
    for i, part in enumerate(error["loc"]):
        if isinstance(data, Mapping) and i and (header := f"{error['loc'][i - 1]}.{part}") in data:
            path, data, union = (*path, header), data[header], None  # a single key in the file is two in the model
        elif part in (data if isinstance(data, Mapping) else range(len(data)) if isinstance(data, list) else ()):
            path, data = (*path, part), data[part]
        elif error["type"] != "missing" or i < len(error["loc"]) - 1:
            union = path if union is None and part != "[key]" else union
    return _Fault(error, path, union, kind)


def _branches(union: Path, faults: list[_Fault], document: Document) -> list[Problem]:
    """A mapping is compared with the branch that is a model; any other value with all branches."""
    inner = [fault for fault in faults if fault.path != union or fault.error["type"] not in _MISFITS]
    if inner:
        return [_problem(fault, document) for fault in inner]
    expected = " or ".join(dict.fromkeys(_expected(fault) for fault in faults))
    hint = next((hint for fault in faults if (hint := _hint(fault))), "")
    return [Problem(union, f"expected {expected}, got {_got(union, document, faults[0].error['input'])}{hint}")]


def _problem(fault: _Fault, document: Document) -> Problem:
    """Values from the environment are replaced by `${NAME}`. Of a key that holds a value too, the key is shown."""
    unknown = fault.path[-1] if fault.error["type"] == "extra_forbidden" else ""
    if key := joined_value(str(unknown), fault.siblings):
        return Problem((*fault.path[:-1], key), "a colon and a blank belong between the key and its value")
    text = _text(fault, document)
    for path, written in document.raw.items():
        value = _at(document.data, path)
        if path[: len(fault.path)] == fault.path and value:
            quote = "" if len(value) >= SECRET_LENGTH else "'"  # a short value could occur inside a word
            text = text.replace(f"{quote}{value}{quote}", f"{quote}{written}{quote}")
    return Problem(fault.path, text)


def _text(fault: _Fault, document: Document) -> str:
    error, kind, context = fault.error, fault.error["type"], fault.error.get("ctx", {})
    if kind == "missing":
        return f"'{error['loc'][-1]}' is missing"
    if kind == "extra_forbidden":
        return f"unknown key{unknown_key(fault.path, fault.siblings, places(fault.kind))}"
    if kind == "too_short":
        return "is empty; at least one is required"
    if kind == "value_error":
        return str(context["error"])
    got = _got(fault.path, document, error["input"])
    if kind in _BOUNDS:
        return f"{_BOUNDS[kind].format(**context)}, got {got}{as_share(error['input'], context.get('lt', 0))}"
    if kind in _MISFITS:
        return f"expected {_expected(fault)}, got {got}{_hint(fault)}"
    return error["msg"] + REMOVED.get(str(error["input"]), "")


def _hint(fault: _Fault) -> str:
    """The mend for a value of another type."""
    kind, got = fault.error["type"], fault.error["input"]
    if _EXPECTED.get(kind) == "a list":
        return as_list(got)
    if _EXPECTED.get(kind) == "a mapping":
        return as_mapping(fault.path, got)
    return nearest(str(got), re.findall(r"'([^']*)'", fault.error.get("ctx", {}).get("expected", "")))


def _expected(fault: _Fault) -> str:
    """The literals, the type, or for a mapping the allowed keys and the alternatives."""
    kind, context = fault.error["type"], fault.error.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "")
    keys = keys_at(schema(fault.kind), fault.path)
    if _EXPECTED[kind] != "a mapping" or not keys:
        return _EXPECTED[kind]
    bare = BARE.get(context.get("class_name", ""))
    words = [] if fault.union else words_at(schema(fault.kind), fault.path)  # branches of a union are listed separately
    return " or ".join([*([bare["description"]] if bare else []), f"{{{', '.join(keys)}}}", *words])


def _got(path: Path, document: Document, seen: Any) -> str:
    """The value as written."""
    if not _SECRETS.isdisjoint(path):
        return "another value"
    value = _at(document.data, path)
    value = seen if value is None else value
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if len(path) <= 2 and path[0] in _HOLDING:
        return "another value"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _at(data: Any, path: Path) -> Any:
    for part in path:
        data = data[part]
    return data


# -- descriptions of settings ----------------------------------------------------------------------
#
# Descriptions of a model's fields, from the docstrings below the fields in the source.
#
# pydantic (`use_attribute_docstrings`) reads every model's source at each start; only the JSON Schema needs the texts.


_NO_SOURCE = (OSError, TypeError, SyntaxError)  # not installed, or replaced while the program runs


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Descriptions by field name; a subclass overrides its bases. Empty without sources."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found.update(_descriptions_in(base.__module__).get(base.__name__, {}))
    return found


@cache
def _descriptions_in(module: str) -> Mapping[str, Mapping[str, str]]:
    """Texts of all classes of a module, by class and field: `inspect` would parse the module for each of these."""
    try:
        parsed = ast.parse(inspect.getsource(sys.modules[module]))
    except _NO_SOURCE:
        return {}
    return {node.name: dict(_own_descriptions(node)) for node in ast.walk(parsed) if isinstance(node, ast.ClassDef)}


def _own_descriptions(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(definition.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(written))):
                yield name, inspect.cleandoc(written)
