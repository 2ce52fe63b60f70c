"""Descriptions of a model's fields: the strings that follow them in the source.

pydantic (`use_attribute_docstrings`) reads every model's source at each start; only the JSON Schema needs the texts.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from textwrap import dedent
from tokenize import TokenError

from pydantic import BaseModel

_NO_SOURCE = (OSError, SyntaxError, TokenError)  # the latter two: text of another version at the place of a model


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Texts by the name of the field; a subclass overrides those of its bases."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found.update(_own_descriptions(base))
    return found


def _own_descriptions(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(_statements(model)):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(written))):
                yield name, inspect.cleandoc(written)


def _statements(model: type[BaseModel]) -> list[ast.stmt]:
    """Of the model's definition. Empty without its source: not installed, or replaced since the program was started."""
    try:
        found = ast.parse(dedent(inspect.getsource(model))).body
    except _NO_SOURCE:
        return []
    match found:
        case [ast.ClassDef(name=model.__name__, body=statements)]:
            return statements
        case _:
            return []
