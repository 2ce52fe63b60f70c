"""An imported configuration: the document, and the account of the keys that it was made of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from gateway.cli.importing.imported_values import Variables
from gateway.cli.importing.key_account import KeyAccount

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
