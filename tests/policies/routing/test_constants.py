"""The room of routing names each number that a reader of its code meets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import policies.routing.decide as entry


def numbers(path: Path) -> Iterator[tuple[str, float]]:
    """Names of a module to which a number is assigned."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = zip(getattr(target, "elts", [target]), getattr(value, "elts", [value]), strict=False)
            for name, part in pairs:
                if isinstance(part, ast.Constant) and isinstance(part.value, (int, float)):
                    yield name.id, part.value


def test_the_docstring_of_decide_names_every_number() -> None:
    """By the file in which it stands, with its value."""
    told = entry.__doc__ or ""
    for path in sorted(Path(entry.__file__).parent.glob("*.py")):
        [line] = [part for part in told.split("\n- ") if part.startswith(f"`{path.stem}`:")] or [""]
        named = re.findall(r"([A-Z_]{4,})\s+(\d[\d.]*)", line)
        assert {name: float(value) for name, value in named} == dict(numbers(path)), path.name
