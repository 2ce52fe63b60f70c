"""Clients under test, as listed in versions.toml, and the environment of each."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
ENVIRONMENTS = Path(os.environ.get("FIRSTTOKEN_CLIENTS") or ROOT / ".cache" / "clients")
PINNED = re.compile(r"[\w@/.-]+?(\[[\w,-]+\])?(==|@)\d[\w.]*")


@dataclass(frozen=True, slots=True)
class Client:
    """A released client, named by the first of `packages`."""

    name: str
    language: str  # python | node
    packages: tuple[str, ...]
    script: str
    settings: str  # all settings of a user
    notes: Mapping[str, str] = field(default_factory=dict)  # by check: the reason for a known failure

    @property
    def folder(self) -> Path:
        """The environment."""
        return ENVIRONMENTS / self.name

    @property
    def stamp(self) -> Path:
        """Written after an installation: holds the installed packages."""
        return self.folder / "installed.txt"

    @property
    def stamped(self) -> bool:
        """True if its packages are the pinned ones."""
        return self.stamp.is_file() and self.stamp.read_text() == stamped(self)

    @property
    def installed(self) -> bool:
        return self.stamped and (self.language == "python" or node().exists())

    @property
    def source(self) -> Path:
        return FOLDER / self.language / self.script


def node() -> Path:
    """The pinned Node.js."""
    return ENVIRONMENTS / "node" / "bin" / "node"


def stamped(client: Client) -> str:
    runtime = (node_package(),) if client.language == "node" else ()
    return "\n".join((*client.packages, *runtime)) + "\n"


def document() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "versions.toml").read_text("utf-8"))


def node_package() -> str:
    return str(document()["node"])


def clients() -> list[Client]:
    """In the order of the file."""
    tables = {name: table for name, table in document().items() if isinstance(table, dict)}
    return [Client(name=name, **{**table, "packages": tuple(table["packages"])}) for name, table in tables.items()]
