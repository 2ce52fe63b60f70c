"""Writes out the constructors of dataclasses that mypyc compiles: `native_constructors.py COPY`, a copy of the sources.

mypyc 2.4 compiles all of a dataclass but `__init__`, which the standard library generates at run time: interpreted, it
takes ten times as long. Each constructor is written into the empty line below its class, so all other lines keep their
numbers.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from pathspec import PathSpec

PACKAGES = ("policies", "backends", "gateway")
UNDERSTOOD = {"default", "default_factory", "init", "compare", "repr"}  # arguments of `field`


@dataclass(frozen=True, slots=True)
class Field:
    """`default`: source text, empty if the caller must give a value. `called`: the text is a call, one per instance."""

    name: str
    type: str
    default: str
    called: bool
    given: bool  # a parameter of the constructor
    kw_only: bool

    @property
    def parameter(self) -> str:
        if self.called:
            return f"{self.name}: {self.type} | None = None"
        return f"{self.name}: {self.type}" + (f" = {self.default}" if self.default else "")

    @property
    def assignment(self) -> str:
        if not self.given:
            return f"self.{self.name} = {self.default}" if self.default else ""
        return f"self.{self.name} = " + (f"{self.default} if {self.name} is None else " * self.called) + self.name


@dataclass(frozen=True, slots=True)
class Dataclass:
    """A dataclass as written. `options`: keywords of the decorator."""

    node: ast.ClassDef
    options: Mapping[str, bool]

    @property
    def own(self) -> Mapping[str, Field]:
        fields = [each for each in self.node.body if isinstance(each, ast.AnnAssign)]
        return {field.name: field for each in fields if (field := self._field(each)) is not None}

    def _field(self, written: ast.AnnAssign) -> Field | None:
        """None: a variable of the class."""
        name, annotation, value = ast.unparse(written.target), ast.unparse(written.annotation), written.value
        assert not annotation.startswith(("InitVar", "KW_ONLY")), f"{self.node.name}.{name}: {annotation}"
        if annotation.startswith("ClassVar"):
            return None
        told = {"default": "" if value is None else ast.unparse(value)}
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
            told = {each.arg or "**": ast.unparse(each.value) for each in value.keywords}
            assert told.keys() <= UNDERSTOOD, f"{self.node.name}.{name}: {told}"
        called = "default_factory" in told
        default = f"({told['default_factory']})()" if called else told.get("default", "")
        return Field(name, annotation, default, called, told.get("init") != "False", self.options.get("kw_only", False))

    def defines(self, method: str) -> bool:
        return any(isinstance(each, ast.FunctionDef) and each.name == method for each in self.node.body)


def dataclasses(tree: ast.Module) -> Iterator[Dataclass]:
    for node in ast.walk(tree):
        for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            call = decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], [])
            if isinstance(node, ast.ClassDef) and ast.unparse(call.func) == "dataclass":
                yield Dataclass(node, {each.arg or "**": ast.literal_eval(each.value) for each in call.keywords})


def lineage(name: str, known: Mapping[str, Dataclass]) -> Iterator[Dataclass]:
    """A dataclass after the dataclasses from which it inherits. Names of classes are unique in the product."""
    if name in known:
        for base in known[name].node.bases:
            yield from lineage(ast.unparse(base), known)
        yield known[name]


def constructor(name: str, known: Mapping[str, Dataclass]) -> str:
    classes = list(lineage(name, known))
    fields = reduce(lambda above, each: above | each, (dict(each.own) for each in classes)).values()
    given = [each for each in fields if each.given]
    named = [each.parameter for each in given if each.kw_only]
    parameters = ["self", *(each.parameter for each in given if not each.kw_only), *(["*", *named] if named else [])]
    statements = [each.assignment for each in fields if each.assignment]
    if any(each.defines("__post_init__") for each in classes):
        statements.append("self.__post_init__()")
    written = f"def __init__({', '.join(parameters)}) -> None: {'; '.join(statements) or 'pass'}"
    return written + ("  # type: ignore[misc]" if known[name].options.get("frozen") else "")


def with_constructors(source: str, known: Mapping[str, Dataclass]) -> str:
    lines = source.split("\n")
    for each in dataclasses(ast.parse(source)):
        if not each.defines("__init__"):
            below = each.node.end_lineno or 0
            assert not lines[below], f"no empty line below {each.node.name}"
            lines[below] = " " * (each.node.col_offset + 4) + constructor(each.node.name, known)
    return "\n".join(lines)


def compiled(root: Path) -> Iterator[Path]:
    """The modules that `pyproject.toml` names."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]
    included, excluded = (PathSpec.from_lines("gitignore", hook[key]) for key in ("include", "exclude"))
    for path in (path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))):
        name = path.relative_to(root)
        if included.match_file(name) and not excluded.match_file(name):
            yield path


def declared(paths: Iterable[Path]) -> dict[str, Dataclass]:
    return {each.node.name: each for path in paths for each in dataclasses(ast.parse(path.read_text()))}


def main(root: Path) -> None:
    if (root / ".git").exists():
        raise SystemExit(f"{root} is a checkout; constructors are written into a copy of the sources")
    known = declared(compiled(root))
    for path in compiled(root):
        path.write_text(with_constructors(path.read_text(), known))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
