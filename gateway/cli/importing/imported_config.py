"""An imported configuration: the document, and the account of the keys that it was made of.

Of every key the account tells whether it came over, has another name, or has no counterpart, and why. Rules:
- A key is a path to a scalar or to an empty list or mapping. An entry for a path covers all keys below it.
- A key without an entry is reported as unknown, so that the sum is always the number of keys.
- Values are never part of an entry: they may be secrets.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import yaml

from gateway.cli.importing.imported_values import Variables
from gateway.config.config_errors import ConfigError, Path, dotted

MAX_KEYS = 100_000
MAX_DEPTH = 100
UNKNOWN = "not known to this importer"
OF_ALL_ROUTES = "routes.*."


class Fate(Enum):
    SAME = "came over"
    RENAMED = "has another name"
    NONE = "has no counterpart"


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """`text`: the new path, or the reason. `pattern`: the new path without the name of a pool or route. `path`: of the
    entry, which covers all keys below it."""

    fate: Fate
    text: str
    pattern: str
    path: Path


def keys_of(node: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of all keys. Raises ConfigError for a file that is nested without end."""
    if len(path) > MAX_DEPTH:
        raise ConfigError([f"{dotted(path[:5])}: nested more than {MAX_DEPTH} levels deep"])
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    if not items or not node:
        yield path
        return
    for key, value in items:
        yield from keys_of(value, (*path, key if isinstance(key, int) and isinstance(node, list) else str(key)))


class KeyAccount:
    """The entries of one file."""

    def __init__(self, document: Any) -> None:
        self.keys: list[Path] = []
        for key in keys_of(document):
            self.keys.append(key)
            if len(self.keys) > MAX_KEYS:
                raise ConfigError([f"the file has more than {MAX_KEYS} keys"])
        self._entries: dict[Path, KeyEntry] = {}

    def moved(self, path: Path, *target: str) -> None:
        """The value is now at `target`, such as pools, NAME, api_key."""
        fate = Fate.SAME if path and path[-1] == target[-1] else Fate.RENAMED
        named = target[0] in ("pools", "routes") and len(target) > 1
        pattern = ".".join((target[0], "*", *target[2:]) if named else target)
        self._entries.setdefault(path, KeyEntry(fate, dotted(target).replace('."*"', ".*"), pattern, path))

    def dropped(self, path: Path, reason: str) -> None:
        self._entries.setdefault(path, KeyEntry(Fate.NONE, reason, reason, path))

    def withdraw_unused(self, routes: Iterable[Mapping[str, Any]], reason: str) -> None:
        """Drop the entries of members of all routes that no route has got."""
        written = {member for route in routes for member in route}
        for path, entry in self._entries.items():
            if entry.text.startswith(OF_ALL_ROUTES) and entry.text.split(".")[2] not in written:
                self._entries[path] = KeyEntry(Fate.NONE, reason, reason, path)

    def known(self, path: Path) -> bool:
        return path in self._entries

    def entry(self, key: Path) -> KeyEntry:
        """The entry of the key, or of the innermost path around it."""
        for length in range(len(key), 0, -1):
            if (found := self._entries.get(key[:length])) is not None:
                return found
        return KeyEntry(Fate.NONE, UNKNOWN, UNKNOWN, key)

    def counts(self) -> Counter[Fate]:
        return Counter(self.entry(key).fate for key in self.keys)

    def unknown(self) -> list[Path]:
        return [key for key in self.keys if self.entry(key).text == UNKNOWN]

    def report(self) -> list[str]:
        """A heading for each fate, and a line for each entry. Entries of a list that fare alike share a line."""
        groups: dict[Fate, dict[tuple[str, str], list[KeyEntry]]] = {fate: {} for fate in Fate}
        for key in self.keys:
            found = self.entry(key)
            groups[found.fate].setdefault((_shape(found.path), found.pattern), []).append(found)
        lines = []
        for fate, rows in groups.items():
            lines.append(f"{fate.value}: {sum(map(len, rows.values()))} of {len(self.keys)} keys")
            lines += [f"  {_line(shape, entries)}" for (shape, _), entries in rows.items()]
        if unknown := len(self.unknown()):
            lines.append(
                f"{unknown} keys are not known to this importer: look them up in the documentation of their program"
            )
        return ["".join(filter(str.isprintable, line)) for line in lines]


def _line(shape: str, entries: list[KeyEntry]) -> str:
    first, count = entries[0], len(entries)
    times = f" ({count} keys)" if count > 1 else ""
    if first.fate is Fate.NONE:
        return f"{shape}{times}: {first.text}"
    return f"{shape}{times} -> {first.text if len({each.text for each in entries}) == 1 else first.pattern}"


def _shape(path: Path) -> str:
    return dotted(tuple("*" if isinstance(part, int) else part for part in path)).replace('."*"', "[*]")


UNPROMISED = {
    "ttft": "off",
    "tpot": "off",
    "hedge": "off",
    "on_miss": "best_effort",
}  # of routes whose source has no budget


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """`source`: the name of the format. `remarks`: what the operator should know of the document."""

    source: str
    document: dict[str, Any]
    account: KeyAccount
    variables: Variables
    remarks: tuple[str, ...] = ()

    def text(self) -> str:
        """YAML, with the variables to set above it."""
        lines = [f"Written by `firsttoken import {self.source}`, which has reported on every key of its source."]
        if self.variables.names:
            lines.append(f"Environment variables: {', '.join(self.variables.names)}")
        return as_yaml(self.document, [*lines, *self.remarks])

    def report(self) -> list[str]:
        """Every key, then the variables that take the place of literal secrets."""
        lines = self.account.report()
        if self.variables.literals:
            names = ", ".join(self.variables.literals)
            lines.append(f"literal secrets are neither written nor shown; set them in the environment: {names}")
        return lines


# -- YAML ------------------------------------------------------------------------------------------
#
# Writes a configuration as YAML that our own loader reads back as it was.
#
# Every text that another reader could take for something else is quoted, and so is every variable.


_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*|https?://[A-Za-z0-9_./:-]*[A-Za-z0-9_/-]|[0-9.]+(?:us|ms|s|m|h|%)")
_WORDS = frozenset("true false null yes no on off y n nan inf".split())


class _Writer(yaml.SafeDumper):
    """Indents lists below their keys, and writes no aliases."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(writer: yaml.SafeDumper, value: str) -> yaml.Node:
    plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return writer.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')


_Writer.add_representer(str, _text)


def as_yaml(document: dict[str, Any], comments: list[str]) -> str:
    """`comments`: lines above the document."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    return head + yaml.dump(
        document, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=False
    )
