"""YAML -> plain data with the source location of each value.

Rules:
- Scalars follow the YAML 1.2 core schema, as in editors: `off`, `on`, `yes` and `no` are text, `010` is ten.
- A duplicate key is an error.
- `${NAME}` and `${NAME:-default}` are replaced in text values, `$$` is a dollar sign.
- Only mappings, lists and scalars are constructed; every other tag is an error.

Presets of the workloads are the ready-made routes of policies/presets/, one file each. Tiers, limits and a budget that
grows with the prompt are a ready-made route's own: no other route has them unless it says so.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml
from yaml.reader import ReaderError

import policies
from gateway.config.config_errors import SECRET_LENGTH, ConfigError, Path, Problem, SourceLocation, quoted, syntax
from policies.routes.route import Workload

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_SCALARS: Mapping[str, Callable[[str], Any]] = {
    _TAG + "null": lambda text: None,
    _TAG + "bool": lambda text: text.lower() == "true",
    _TAG + "int": int,
    _TAG + "float": float,
    _TAG + "str": str,
}
PLACEHOLDER = "a-variable-that-is-not-set"
_QUOTED = re.compile(r"'([^']*)'")
# A dollar sign, or a reference; the last branch matches a malformed reference.
_REFERENCE = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}|(\{[^}]*\}?))")


class _Loader(yaml.SafeLoader):
    """Composes nodes; resolves scalars by the YAML 1.2 core schema."""

    yaml_implicit_resolvers = {}


for _tag, _pattern, _first in (
    (_MERGE, r"<<", "<"),
    (_TAG + "null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_TAG + "bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (_TAG + "int", r"[-+]?[0-9]{1,18}", "-+0123456789"),
    (_TAG + "float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), list(_first))


@dataclass(frozen=True, slots=True)
class Document:
    """`raw`: the original text of values in which a variable was replaced; `problems`: of the text, with their lines;
    `unknown`: paths of values that are not known because of these; `lost`: some sections may be missing."""

    data: dict[str, Any] = field(default_factory=dict)
    locations: dict[Path, SourceLocation] = field(default_factory=dict)
    raw: dict[Path, str] = field(default_factory=dict)
    problems: list[tuple[SourceLocation, str]] = field(default_factory=list)
    unknown: set[Path] = field(default_factory=set)
    unset: set[Path] = field(default_factory=set)  # of these, values of variables that are not set
    lost: bool = False
    files: list[str] = field(default_factory=list)  # in the order of their merge

    def location(self, path: Path) -> SourceLocation:
        """Location of the value at `path`, or of the innermost value around it."""
        while path and path not in self.locations:
            path = path[:-1]
        return self.locations.get(path, SourceLocation("config"))

    def is_unknown(self, path: Path) -> bool:
        """The value at `path`, or one around it, has a problem already."""
        return any(path[:length] in self.unknown for length in range(1, len(path) + 1))


def parse(text: str, file: str, environ: Mapping[str, str]) -> Document:
    """Raises ConfigError with all problems of the file. `text` holds one YAML document."""
    document = read(text, file, environ)
    if document.problems:
        raise ConfigError([problem for _, problem in document.problems])
    return document


def read(text: str, file: str, environ: Mapping[str, str], any_variable: bool = False) -> Document:
    """Parse `text`, one YAML document, and note the problems of the text. `any_variable`: a variable that is not set is
    no problem."""
    try:
        node = yaml.compose(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return unreadable(SourceLocation(file, mark.line + 1 if mark else 0), _syntax(file, error, text))
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"{file}:{line}: not YAML: the character U+{error.character:04X}"
        return unreadable(SourceLocation(file, line), problem)
    builder = _Builder(file, environ, any_variable)
    data = {} if node is None else builder.root(node)
    return Document(
        data or {},
        builder.locations,
        builder.raw,
        builder.problems,
        builder.unknown,
        builder.unset,
        lost=data is None,
        files=[file],
    )


def unreadable(location: SourceLocation, problem: str) -> Document:
    return Document(problems=[(location, problem)], lost=True, files=[location.file])


def put(data: Any, path: Path, value: Any) -> None:
    """Replaces the value at `path`."""
    for part in path[:-1]:
        data = data[part]
    data[path[-1]] = value


def merge(under: Document, over: Document) -> Document:
    """`over` on top of `under`: mappings are merged key by key, all other values are replaced."""
    replaced: list[Path] = []
    data = _overlay((), under.data, over.data, replaced)
    kept = {path: location for path, location in under.locations.items() if not _within(path, replaced)}
    raw = {path: text for path, text in under.raw.items() if not _within(path, replaced)}
    return Document(
        data,
        kept | over.locations,
        raw | over.raw,
        under.problems + over.problems,
        under.unknown | over.unknown,
        under.unset | over.unset,
        under.lost or over.lost,
        under.files + over.files,
    )


def _overlay(path: Path, under: dict[str, Any], over: dict[str, Any], replaced: list[Path]) -> dict[str, Any]:
    data = dict(under)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            data[key] = _overlay((*path, key), under[key], value, replaced)
        else:
            data[key] = value
            replaced.append((*path, key))
    return data


def _within(path: Path, roots: list[Path]) -> bool:
    return any(path[: len(root)] == root for root in roots)


def _syntax(file: str, error: yaml.MarkedYAMLError, source: str) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
    text, hint = " ".join(str(error.problem or error.context).split()), syntax(error, source)
    if "'\\t'" in text:
        text, hint = "a tab; indent with spaces", ""
    elif "but found another document" in text:
        text, hint = "a second document; write one per file", ""
    return f"{where}: not YAML: {_QUOTED.sub(_unless_long, text)}{hint}"


def _unless_long(match: re.Match[str]) -> str:
    """Hides a quoted text of the length of a secret, except for names of YAML tokens: '<stream end>'."""
    return match[0] if len(match[1]) < SECRET_LENGTH or match[1].startswith("<") else "(value hidden)"


def _shown(tag: str) -> str:
    return tag.replace(_TAG, "!!") if tag.startswith(_TAG) or len(tag) < SECRET_LENGTH else "(hidden)"


class _Builder:
    """Walks a node graph once and builds plain data, with locations and original texts by path."""

    def __init__(self, file: str, environ: Mapping[str, str], any_variable: bool) -> None:
        self.locations: dict[Path, SourceLocation] = {}
        self.raw: dict[Path, str] = {}
        self.problems: list[tuple[SourceLocation, str]] = []
        self.unknown: set[Path] = set()
        self.unset: set[Path] = set()
        self._file = file
        self._environ = environ
        self._any_variable = any_variable
        self._open: set[int] = set()  # nodes in progress: an alias to such a node is a cycle

    def root(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.MappingNode):
            return self._problem(node, (), "expected sections such as pools: and routes:")
        self.locations[()] = SourceLocation(self._file)
        return self._value(node, ())

    def _problem(self, node: yaml.Node, path: Path, text: str, *, known: bool = False) -> None:
        """`known`: the value at `path` is not the problem."""
        location = SourceLocation(self._file, node.start_mark.line + 1)
        self.problems.append((location, Problem(path, text).at(location)))
        if not known:
            self.unknown.add(path)

    def _value(self, node: yaml.Node, path: Path) -> Any:
        if id(node) in self._open:
            return self._problem(node, path, "an alias that contains itself")
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
            return self._scalar(node, path)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return [self._item(item, item, (*path, i)) for i, item in enumerate(node.value)]
            return self._problem(node, path, f"unsupported tag {_shown(node.tag)}")
        finally:
            self._open.discard(id(node))

    def _item(self, place: yaml.Node, node: yaml.Node, path: Path) -> Any:
        """A value of a list or mapping, with the location of `place`."""
        self.locations[path] = SourceLocation(self._file, place.start_mark.line + 1)
        return self._value(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                data = self._merged(value, path) | data
        lines: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                continue
            if not isinstance(key, yaml.ScalarNode):
                self._problem(key, path, "a key must be a name", known=True)
            elif key.value in lines:
                text = f"duplicate key, first on line {lines[key.value]}"
                self._problem(key, (*path, key.value), text, known=True)
            else:
                lines[key.value] = key.start_mark.line + 1
                data[key.value] = self._item(key, value, (*path, key.value))
        return data

    def _merged(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        """The mapping of `<<:`, or several, of which the first takes precedence."""
        data: dict[str, Any] = {}
        for source in reversed(node.value) if isinstance(node, yaml.SequenceNode) else [node]:
            value = self._value(source, path)
            if isinstance(value, dict):
                data |= value
            else:
                self._problem(source, path, "<< takes a mapping, or a list of them", known=True)
        return data

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        if node.tag == _TAG + "str":
            return _REFERENCE.sub(lambda match: self._variable(match, node, path), node.value)
        try:
            return _SCALARS[node.tag](node.value)
        except ValueError:
            return self._problem(node, path, f"{quoted(node.value)} does not match the tag {_shown(node.tag)}")

    def _variable(self, match: re.Match[str], node: yaml.ScalarNode, path: Path) -> str:
        dollar, name, default, broken = match.groups()
        if broken:
            hint = "is not ${NAME} or ${NAME:-default}; write $$ for a dollar sign"
            self._problem(node, path, f"{quoted(match[0])} {hint}")
        if dollar or broken:
            return "$"
        self.raw[path] = node.value
        value = self._environ.get(name)
        if value is None and default is None:
            self.unknown.add(path)
            self.unset.add(path)
            if not self._any_variable:
                text = f"the environment variable {name} is not set; set it, or write ${{{name}:-default}}"
                self._problem(node, path, text)
            return PLACEHOLDER
        return value or default or ""


FOLDER = pathlib.Path(policies.__path__[0]) / "presets"
_OWN = ("tiers", "limits", "per_1k_tokens")


@cache
def preset(workload: Workload) -> dict[str, Any]:
    """Defaults of a route with this workload."""
    file = FOLDER / f"{workload}.yaml"
    return _without_own(parse(file.read_text("utf-8"), file.name, {}).data["routes"][workload])


def _without_own(section: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in section.items() if key not in _OWN}
    return {key: _without_own(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def with_preset(workload: Workload, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `raw`, the route as written by the operator, over the preset of the workload."""
    return merge(Document(preset(workload)), Document(dict(raw))).data
