"""The constructors written out for mypyc are those of the dataclasses, and nothing else of the sources changes."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from scripts.native_constructors import compiled, constructor, dataclasses, declared, with_constructors

ROOT = Path(__file__).parents[2]
SAMPLE = '''
from dataclasses import dataclass, field
from typing import ClassVar

LIMIT = 3

@dataclass(slots=True)
class Base:
    """Read first."""

    name: str
    tags: list[str] = field(default_factory=list)
    kind: ClassVar[str] = "base"

    def shown(self) -> str:
        return f"{self.name}: {self.tags}"

@dataclass(slots=True, kw_only=True)
class Derived(Base):
    limit: int = LIMIT
    left: int = field(init=False)
    used: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.left = self.limit - len(self.tags)

class Plain:
    pass

@dataclass(frozen=True)
class Fixed:
    value: int

@dataclass
class Own:
    value: int

    def __init__(self) -> None:
        self.value = 7

def last() -> int:
    return 1
'''


def written(source: str) -> str:
    return with_constructors(source, {each.node.name: each for each in dataclasses(ast.parse(source))})


def executed(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, "<sample>", "exec", dont_inherit=True), names)
    return names


def sample() -> str:
    """With the empty lines below each class that the formatter writes."""
    return SAMPLE.replace("\n@dataclass", "\n\n@dataclass").replace("\ndef last", "\n\ndef last")


def test_a_written_constructor_does_what_the_generated_one_did() -> None:
    before, after = executed(sample()), executed(written(sample()))
    for made in (before, after):
        first, second = made["Derived"]("a"), made["Derived"]("b", ["x"], limit=2)
        assert (first.tags, first.limit, first.left, first.used) == ([], 3, 3, 0)
        assert (second.shown(), second.left) == ("b: ['x']", 1)
        first.tags.append("own")
        assert made["Derived"]("c").tags == []
        with pytest.raises(TypeError):
            made["Derived"]("d", [], 2)
    assert after["Derived"].__init__.__code__.co_filename == "<sample>"
    assert before["Derived"].__init__.__code__.co_filename != "<sample>"


def test_a_constructor_that_is_there_stays() -> None:
    assert executed(written(sample()))["Own"]().value == 7


def test_fields_of_a_frozen_class_are_set_against_mypys_word() -> None:
    assert "self.value = value  # type: ignore[misc]" in written(sample())


def test_all_other_lines_keep_their_numbers() -> None:
    pairs = list(zip(sample().split("\n"), written(sample()).split("\n"), strict=True))
    assert [before for before, after in pairs if before != after] == ["", "", ""]


def test_an_unknown_kind_of_field_is_an_error() -> None:
    with pytest.raises(AssertionError, match="metadata"):
        written("@dataclass\nclass A:\n    a: int = field(metadata={})\n\n")
    with pytest.raises(AssertionError, match="InitVar"):
        written("@dataclass\nclass A:\n    a: InitVar[int]\n\n")


def test_a_checkout_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    command = [sys.executable, str(ROOT / "scripts/native_constructors.py"), str(tmp_path)]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "checkout" in refused.stderr


@pytest.mark.source
def test_every_compiled_dataclass_keeps_its_signature() -> None:
    paths = list(compiled(ROOT))
    known, signatures = declared(paths), 0
    for path in paths:
        module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for each in dataclasses(ast.parse(path.read_text())):
            if not each.defines("__init__"):
                names = executed(f"from __future__ import annotations\n{_bare(constructor(each.node.name, known))}")
                made = inspect.signature(names["__init__"]).parameters.values()
                real = inspect.signature(getattr(module, each.node.name).__init__).parameters.values()
                assert [_form(one) for one in made] == [_form(one) for one in real], each.node.name
                signatures += 1
    assert signatures > 80


def _form(parameter: inspect.Parameter) -> tuple[str, Any, bool]:
    return parameter.name, parameter.kind, parameter.default is not inspect.Parameter.empty


def _bare(written: str) -> str:
    """Without the body, and with defaults that need no names."""
    tree = ast.parse(written)
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            node.defaults = [ast.Constant(None) for _ in node.defaults]
            node.kw_defaults = [None if each is None else ast.Constant(None) for each in node.kw_defaults]
    return ast.unparse(tree)
