"""Descriptions of a model's fields: the strings that follow them in the source.

pydantic (`use_attribute_docstrings`) reads every model's source at each start; only the JSON Schema needs the texts.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise

from pydantic import BaseModel

_NO_SOURCE = (OSError, TypeError, SyntaxError)  # not installed, or replaced while the program runs


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Texts by the name of the field; a subclass overrides those of its bases. Empty without sources."""
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
