"""`firsttoken import FORMAT FILE`: writes a configuration of ours, and reports what became of every key of the file.

The YAML goes to standard output and the report to standard error; with `-o` the YAML goes to a new file and the report
to standard output. Neither holds a literal secret of the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from gateway.cli.importing.imported_config import ImportedConfig
from gateway.cli.importing.litellm_import import import_litellm
from gateway.cli.importing.stack_import import import_stack
from gateway.config.config_errors import ConfigError, file_errors

MAX_FILE = 4 << 20  # bytes


def run_import(args: argparse.Namespace) -> int:
    """Raises ConfigError."""
    document, remarks = _read(args.file)
    try:
        found = IMPORTERS[args.format](document, args)
    except RecursionError:
        raise ConfigError([f"{args.file}: nested too deeply, or without end"]) from None
    report = "\n".join([*found.report(), *remarks])
    if args.output is None:
        print(found.text(), end="", flush=True)
        print(report, file=sys.stderr)
    else:
        _write(args.output, found.text())
        print(f"{report}\nwritten: {args.output}")
    return 0


IMPORTERS: Mapping[str, Callable[[Any, argparse.Namespace], ImportedConfig]] = {
    "litellm": lambda document, args: import_litellm(document),
    "production-stack": lambda document, args: import_stack(document, args.release),
}


class _Reader(yaml.SafeLoader):
    """YAML 1.1, as LiteLLM and Helm read it. `repeated`: lines of keys that stand twice, of which the last counts."""

    def __init__(self, stream: bytes) -> None:
        super().__init__(stream)
        self.repeated: list[int] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    self.repeated.append(key.start_mark.line + 1)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> tuple[Any, list[str]]:
    """The document, and remarks on its form. Of a syntax error only the place is shown: the text may hold secrets."""
    try:
        with file_errors(path, "read"):
            data = path.read_bytes()
        if len(data) > MAX_FILE:
            raise ConfigError([f"{path}: larger than {MAX_FILE >> 20} MiB"])
        reader = _Reader(data)
        document = reader.get_single_data()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError([f"{path}{line}: not YAML; correct this line first"]) from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError([f"{path}: not YAML"]) from None
    return document, [f"{path}:{line}: a key that stands twice; the last one counts" for line in reader.repeated[:20]]


def _write(path: Path, text: str) -> None:
    """Never over an existing file."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError([f"{path}: exists already; name another file, or move it away"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be written: {error.strerror}"]) from None
