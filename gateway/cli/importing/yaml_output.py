"""Writes a configuration as YAML that our own loader reads back as it was.

Every text that another reader could take for something else is quoted, and so is every variable.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

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
