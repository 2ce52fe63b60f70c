"""`firsttoken advise`: breaks of prefixes and growth of prompts, from a gateway or its access log."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gateway.cli.advise.report import html_report, report
from gateway.cli.gateway_client import ask_admin
from gateway.config.config_errors import ConfigError, file_errors
from gateway.records.log_entries import entry_of, mended
from policies.prefix_doctor.advice import Advice, advice
from policies.prefix_doctor.prefix_ledger import PrefixLedger

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def advise(args: argparse.Namespace) -> int:
    """`args`: source, html, mended, json. Raises ConfigError."""
    is_url = args.source.startswith(("http://", "https://"))
    if is_url and args.mended is not None:
        raise ConfigError(["firsttoken: --mended takes a log: name one with --from"])
    sums = ask_admin(args.source, "/advise") if is_url else of_log(Path(args.source))
    found = _advice(args.source, sums)
    if args.mended is not None:
        _write(args.mended, _mended(Path(args.source)), "--mended")
    if args.html is not None:
        _write(args.html, html_report(found, args.source), "--html")
    print(json.dumps(sums, indent=2) if args.json else report(found, args.source))
    return 0


def of_log(path: Path) -> Mapping[str, Any]:
    """The sums of a log. Its first and last line are the time that was observed. Raises ConfigError."""
    ledger, first, last = PrefixLedger(0.0, rotates=False), 0.0, 0.0
    for number, row in enumerate(_rows(path), 1):
        try:
            if (entry := entry_of(row)) is not None:
                first, last = min(first or entry.wall, entry.wall), max(last, entry.wall)
                ledger.note(entry, 0.0)
        except MALFORMED:
            raise ConfigError([f"{path}:{number}: not a line of this version's access log"]) from None
    if not last:
        raise ConfigError([f"{path}: no line tells the parts of its prompt: the log is of an older version, or empty"])
    return ledger.as_json(last - first, last)


def _mended(path: Path) -> str:
    try:
        return "".join(json.dumps(row) + "\n" for row in mended(_rows(path)))
    except MALFORMED as error:
        raise ConfigError([f"{path}: not this version's access log: {error}"]) from None


def _advice(source: str, sums: Mapping[str, Any]) -> Advice:
    try:
        return advice(sums)
    except MALFORMED:
        raise ConfigError([f"{source}: this is not the admin port of a gateway of this version"]) from None


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Raises ConfigError."""
    try:
        with file_errors(path, "read"), path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"line {number} is no object")
                    yield row
    except ValueError as error:
        raise ConfigError([f"{path}: not an access log, a JSON object in each line: {error}"]) from None


def _write(path: Path, text: str, option: str) -> None:
    with file_errors(f"firsttoken: {option} {path}", "written"):
        path.write_text(text, "utf-8")
