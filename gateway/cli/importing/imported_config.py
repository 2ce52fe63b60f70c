"""An imported configuration: the document, and the account of the keys that it was made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.cli.importing.imported_values import Variables
from gateway.cli.importing.key_account import KeyAccount
from gateway.cli.importing.yaml_output import as_yaml

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
