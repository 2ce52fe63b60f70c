"""`@value`: a frozen dataclass to the type checker, a plain one with slots at run time.

A frozen dataclass writes each field through `object.__setattr__`: 0.2 us a field, and a request makes
over a hundred. mypy holds what the run time then need not: nobody assigns to a field of a value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Equality and hash by fields."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
