"""Structure rules of the docs, checked on the source text, without imports of the product.

Import cycles and imports between packages are contracts of import-linter (pyproject.toml).
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

from tests.programs import house

ROOT = Path(__file__).parents[1]
PACKAGES = ("firsttoken", "gateway", "policies", "backends", "lab")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = {str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__") for path in FILES}

VAGUE_OPENING = re.compile(r"(What|Who|Whom|Whose|Whether|How|Where)\b")
PICTURE = re.compile(r"<!-- rooms -->\s*```mermaid\n(.*?)```", re.DOTALL)
ARROW = re.compile(r"^\s*(\w+) --> (\w+(?: & \w+)*)\s*$", re.MULTILINE)
STANDARD_NAMES = {"_exit", "_replace"}  # documented by Python
PRIVATE_NAMES = {  # of libraries, with the reason to use each
    "gateway/tokenize/tokenizers.py: _resize_cache": "no cache whose time would tell a tenant another's words",
}
TOUR_ROW = re.compile(r"^\| \[(?:gateway|policies|backends|lab)/[^|]*\|", re.MULTILINE)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


def classes() -> Iterator[str]:
    return (node.name for path in FILES for node in nodes(path) if isinstance(node, ast.ClassDef))


def room(module: str) -> str:
    """The folder of a module below its package; `main` for modules beside the folders."""
    package, *rest = module.split(".")
    if package != "gateway":
        return package
    return rest[0] if (ROOT / package / rest[0]).is_dir() else "main"


def imported(path: Path) -> Iterator[str]:
    """Modules of the product imported by a file, inside functions and under TYPE_CHECKING too."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES
            yield from names or {node.module} & MODULES
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & MODULES


def arrows() -> set[tuple[str, str]]:
    """Imports between rooms."""
    found = set()
    for path in FILES:
        module = str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
        if path.name != "__init__.py":
            found |= {(room(module), room(target)) for target in imported(path)}
    return {(source, target) for source, target in found if source != target}


def test_class_names_are_unique() -> None:
    """A search for a class finds one definition."""
    assert [name for name, count in Counter(classes()).items() if count > 1] == []


def test_no_file_name_is_used_twice() -> None:
    """A direction of translation is named by its folder, `chat_to_messages/request.py`, and so is a part:
    `parts/picker/part.py`."""
    directions = {"chat_to_messages", "chat_to_responses", "messages_to_chat", "responses_to_chat"}
    named = [path for path in FILES if path.name not in ("__init__.py", "__main__.py")]
    by_folder = [path.parent.name in directions or path.match("gateway/parts/*/part.py") for path in named]
    names = Counter(str(path) if of_folder else path.name for path, of_folder in zip(named, by_folder, strict=True))
    assert [name for name, count in names.items() if count > 1] == []


def test_package_files_are_empty() -> None:
    assert [path for path in FILES if path.name == "__init__.py" and path.read_text("utf-8")] == []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("_")


def name_of(node: ast.AST) -> str:
    """Of a definition, a variable or an attribute."""
    return getattr(node, "attr", None) or getattr(node, "name", None) or getattr(node, "id", "")


@cache
def names_of(library_class: type) -> set[str]:
    """Attributes of a class, those that its methods set included."""
    names = set(dir(library_class))
    for each in getattr(library_class, "__mro__", ()):  # typing.NamedTuple is a function
        with suppress(OSError, TypeError):  # written in C
            names.update(re.findall(r"\bself\.(\w+)", inspect.getsource(each)))
    return names


def inherited_private_names(path: Path) -> Iterator[str]:
    """Private names of a library's class in the body of a class that inherits from it, redefined ones too."""
    imports = [node for node in nodes(path) if isinstance(node, ast.ImportFrom)]
    origins = {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}
    for node in nodes(path):
        if isinstance(node, ast.ClassDef):
            bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in origins]
            for base in [base for base in bases if not origins[base].startswith(PACKAGES)]:
                names = set(map(name_of, ast.walk(node)))
                yield from filter(is_private, names & names_of(getattr(import_module(origins[base]), base)))


@cache
def defined_names() -> frozenset[str]:
    """Functions, variables and attributes of the product."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    every = [node for path in FILES for node in nodes(path)]
    stored = [node for node in every if isinstance(node, kinds) or isinstance(getattr(node, "ctx", None), ast.Store)]
    return frozenset(map(name_of, stored))


def foreign_private_names(path: Path) -> Iterator[str]:
    """Private names that this file imports, or reads although no file of the product defines them."""
    for node in nodes(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (part for module in modules for part in module.split(".") if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            yield from {node.attr} - defined_names() - STANDARD_NAMES


def test_private_names_of_libraries_are_few_and_known() -> None:
    """A release may rename them. Each has a reason."""
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES
        for name in (*inherited_private_names(path), *foreign_private_names(path))
    }
    assert found == PRIVATE_NAMES.keys()


def test_the_formatter_lays_out_every_line() -> None:
    texts = {path: path.read_text("utf-8") for path in FILES}
    assert [path for path, text in texts.items() if "fmt: skip" in text or "fmt: off" in text] == []


def test_attributes_are_assigned_one_or_two_at_a_time() -> None:
    """Three or more attributes in one tuple assignment are read by counting places."""
    assigned = [(path, node) for path in FILES for node in nodes(path) if isinstance(node, ast.Assign)]
    assert [f"{path}:{node.lineno}" for path, node in assigned if any(map(is_wide, node.targets))] == []


def is_wide(target: ast.expr) -> bool:
    return isinstance(target, ast.Tuple) and sum(isinstance(each, ast.Attribute) for each in target.elts) > 2


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    """`Returns the ...`, not `What is ...`: a reader who searches finds the subject."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [(path, ast.get_docstring(node) or "") for path in FILES for node in nodes(path) if isinstance(node, kinds)]
    assert [f"{path}: {doc.splitlines()[0]}" for path, doc in docs if VAGUE_OPENING.match(doc)] == []


NAMES_OF_REDIS = ROOT / "gateway/cluster/redis_names.py"
REDIS_CLIENTS = {"redis", "client", "_redis"}


def test_one_function_makes_every_name_in_redis() -> None:
    """No other place begins a text with the product's prefix or with a namespace, or asks a client by a literal."""

    def spells(node: ast.AST) -> bool:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return re.match(r"firsttoken:\S", node.value) is not None
        if isinstance(node, ast.JoinedStr):
            first = node.values[0].value if node.values and isinstance(node.values[0], ast.FormattedValue) else None
            return "namespace" in (getattr(first, "id", ""), getattr(first, "attr", ""))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            asked = node.func.value
            of_client = getattr(asked, "id", getattr(asked, "attr", "")) in REDIS_CLIENTS
            return of_client and node.func.attr != "info" and isinstance(node.args[0], ast.Constant | ast.JoinedStr)
        return False

    files = [path for path in FILES if path.is_relative_to(ROOT / "gateway") and path != NAMES_OF_REDIS]
    found = [f"{path.relative_to(ROOT)}:{node.lineno}" for path in files for node in nodes(path) if spells(node)]  # type: ignore[attr-defined]
    assert found == []


def test_the_picture_of_the_rooms_shows_the_imports() -> None:
    """Every arrow of the picture is an import, and every import between rooms an arrow.

    Arrows from `main` (the composition root and its neighbours), from `cli`, from `parts` and from `lab` go nearly
    everywhere and are left out; so are those to `policies` and `backends`, which every room may import.
    """
    picture = PICTURE.search((ROOT / "docs/architecture.md").read_text("utf-8"))
    assert picture is not None
    drawn = {(source, target) for source, targets in ARROW.findall(picture[1]) for target in targets.split(" & ")}
    left_out = {"main", "cli", "parts", "lab", "firsttoken"}
    shown = {(source, target) for source, target in arrows() if source not in left_out}
    assert drawn == {(source, target) for source, target in shown if target not in ("policies", "backends", "main")}


def test_the_reading_tour_is_twenty_files_at_most() -> None:
    """Each row of the tour names one file, never a folder."""
    tour = (ROOT / "docs/architecture.md").read_text("utf-8").partition("## Read first")[2].partition("\n## ")[0]
    links = re.findall(r"\]\(\.\./((?:gateway|policies|backends|lab)/[^)]+)\)", tour)
    assert 0 < len(set(links)) <= 20
    assert [link for link in links if not (ROOT / link).is_file()] == []


CORE = (
    *("core", "wiring.py", "proxy.py", "request_reader.py", "decider.py", "scheduler.py", "runtime.py"),
    *("data_port.py", "refusals.py", "upstream", "downstream", "api", "tokenize"),
)
COMPOSITION = {"gateway/part_list.py", "gateway/serve.py"}
# Of parts that have left the core: the list grows with each.
WORDS_OF_PARTS = (
    *("picker", "llm_d", "kvevents", "learned_keeper", "learnedkeeper", "witness_probe", "cache_warming"),
    *("cachewarming", "otlp", "opentelemetry", "redis", "kubernetes", "keyring", "record_ring", "recordlogs"),
    *("rescue", "escalat", "answer_cache", "answercache", "count_repl", "state_ids", "history_keeper"),
)


def test_the_core_of_a_first_change_names_no_feature() -> None:
    """Decisions, queue and attempts included: a feature hangs on the core by hooks, and has names of its own."""
    core = house.files(*house.CORE)
    found = {name: len(house.naming(words, core)) for name, words in house.WORDS.items()}
    assert {name: count for name, count in found.items() if count} == {}


def test_the_core_has_no_words_of_parts() -> None:
    """Names and comments alike: who reads the core meets no feature."""
    core = [path for path in FILES if is_core(path)]
    assert len(core) > 30
    found = {
        f"{path.relative_to(ROOT)}: {word}"
        for path in core
        for word in WORDS_OF_PARTS
        if word in path.read_text("utf-8").lower()
    }
    assert found == set()


def is_core(path: Path) -> bool:
    return path.is_relative_to(ROOT / "gateway") and path.relative_to(ROOT / "gateway").parts[0] in CORE


def test_in_a_running_gateway_only_the_composition_imports_parts() -> None:
    """Others ask a gateway for a part by its hooks, or by the type of what it offers."""
    free = [ROOT / "gateway" / name for name in ("parts", "cli")]
    others = [path for path in (ROOT / "gateway").rglob("*.py") if not any(map(path.is_relative_to, free))]
    importing = {
        str(path.relative_to(ROOT))
        for path in others
        if any(target.startswith("gateway.parts.") for target in imported(path))
    }
    assert importing == COMPOSITION


def test_the_gateway_knows_its_parts_by_their_list_alone() -> None:
    """`app.py` names no part: it builds, starts and closes what the list gives."""
    parts = re.findall(
        r"^from gateway\.parts\.\S+ import (.+)$", (ROOT / "gateway/part_list.py").read_text(), re.MULTILINE
    )
    text = (ROOT / "gateway/app.py").read_text("utf-8")
    assert len(parts) > 20
    assert [part for part in parts if re.search(rf"\b{part}\b", text)] == []
