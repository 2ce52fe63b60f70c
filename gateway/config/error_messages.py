"""Translates pydantic's errors: location in the file, expected value, actual value.

Rules:
- Paths are those of the file, without names of models and of union branches.
- Actual values are quoted as written in the file, so that secrets from the environment stay hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from gateway.config.config_errors import SECRET_LENGTH, Path, Problem, did_you_mean, nearest
from gateway.config.schema import BARE, keys_at, schema, words_at
from gateway.config.yaml_source import Document

_SECRETS = frozenset({"api_key", "headers", "sha256", "redis", "cache_secret"})
_HOLDING = frozenset({"keys", "state", "pools"})  # paths where a text instead of a mapping is likely to be a secret
_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text (in quotes)",
    "tuple_type": "a list",
    "list_type": "a list",
    "frozen_set_type": "a list",
    "mapping_type": "a mapping",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_MISFITS = frozenset({*_EXPECTED, "literal_error"})  # the value is of another kind than the place is for
_BOUNDS = {
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
}


@dataclass(frozen=True, slots=True)
class _Fault:
    """An error and its path in the file. `union`: the path of the enclosing union, if any."""

    error: ErrorDetails
    path: Path
    union: Path | None


def messages(errors: Sequence[ErrorDetails], document: Document) -> list[Problem]:
    """Every problem of `document`, once."""
    faults = [fault for fault in (_located(error, document.data) for error in errors) if not _echo(fault, document)]
    found = [_problem(fault, document) for fault in faults if fault.union is None]
    for union in dict.fromkeys(fault.union for fault in faults if fault.union is not None):
        found += _branches(union, [fault for fault in faults if fault.union == union], document)
    return list(dict.fromkeys(found))


def _located(error: ErrorDetails, data: Any) -> _Fault:
    """Removes pydantic's own parts of a location: the name of a union branch, `[key]`."""
    path: Path = ()
    union: Path | None = None
    for i, part in enumerate(error["loc"]):
        if isinstance(data, Mapping) and i and (header := f"{error['loc'][i - 1]}.{part}") in data:
            path, data, union = (*path, header), data[header], None  # one key in the file, two parts of the location
        elif _holds(data, part):
            path, data = (*path, part), data[part]
        elif error["type"] != "missing" or i < len(error["loc"]) - 1:
            union = path if union is None and part != "[key]" else union
    return _Fault(error, path, union)


def _holds(data: Any, part: str | int) -> bool:
    return part in (data if isinstance(data, Mapping) else range(len(data)) if isinstance(data, list) else ())


def _echo(fault: _Fault, document: Document) -> bool:
    """Drops the error that a list is too short if its items have errors of their own."""
    value = _at(document.data, fault.path)
    return fault.error["type"] == "too_short" and isinstance(value, list) and len(value) > 0


def _branches(union: Path, faults: list[_Fault], document: Document) -> Iterator[Problem]:
    """A mapping was meant as the branch that is a model; for other values all expected forms are listed."""
    inner = [fault for fault in faults if fault.path != union or fault.error["type"] not in _MISFITS]
    if inner:
        yield from (_problem(fault, document) for fault in inner)
    else:
        expected = " or ".join(dict.fromkeys(_expected(fault) for fault in faults))
        yield Problem(union, f"expected {expected}, got {_got(union, document, faults[0].error['input'])}")


def _problem(fault: _Fault, document: Document) -> Problem:
    return Problem(fault.path, _masked(_text(fault, document), fault.path, document))


def _text(fault: _Fault, document: Document) -> str:
    error, kind, context = fault.error, fault.error["type"], fault.error.get("ctx", {})
    if kind == "missing":
        return f"'{error['loc'][-1]}' is missing"
    if kind == "extra_forbidden":
        return f"unknown key{did_you_mean(str(fault.path[-1]), keys_at(schema(), fault.path[:-1]))}"
    if kind == "too_short":
        return "is empty; name at least one"
    if kind == "value_error":
        return str(context["error"])
    got = _got(fault.path, document, error["input"])
    if kind in _BOUNDS:
        return f"{_BOUNDS[kind].format(**context)}, got {got}"
    if kind in _MISFITS:
        return f"expected {_expected(fault)}, got {got}{_near(error)}"
    return error["msg"]


def _expected(fault: _Fault) -> str:
    kind = fault.error["type"]
    if kind == "literal_error":
        return str(fault.error["ctx"]["expected"]).replace("'", "")
    return _mapping(fault) if _EXPECTED[kind] == "a mapping" else _EXPECTED[kind]


def _mapping(fault: _Fault) -> str:
    """The keys of the mapping, and the other values that are allowed."""
    keys = keys_at(schema(), fault.path)
    if not keys:
        return "a mapping"
    bare = BARE.get(fault.error["ctx"].get("class_name", ""))
    words = [] if fault.union else words_at(schema(), fault.path)  # a union lists the keys in its branches
    return " or ".join([*([bare["description"]] if bare else []), f"{{{', '.join(keys)}}}", *words])


def _near(error: ErrorDetails) -> str:
    """The literal that was probably meant."""
    expected = error.get("ctx", {}).get("expected", "")
    return nearest(str(error["input"]), re.findall(r"'([^']*)'", expected))


def _got(path: Path, document: Document, seen: Any) -> str:
    """The value as written."""
    if not _SECRETS.isdisjoint(path):
        return "something else"
    value = _at(document.data, path)
    value = seen if value is None else value
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if len(path) <= 2 and path[0] in _HOLDING:
        return "something else"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _masked(text: str, path: Path, document: Document) -> str:
    """`text` with values from the environment replaced by `${NAME}`."""
    for at, written in document.raw.items():
        value = _at(document.data, at)
        if at[: len(path)] == path and value:
            quote = "" if len(value) >= SECRET_LENGTH else "'"  # a short value would match inside words
            text = text.replace(f"{quote}{value}{quote}", f"{quote}{written}{quote}")
    return text


def _at(data: Any, path: Path) -> Any:
    for part in path:
        data = data[part]
    return data
