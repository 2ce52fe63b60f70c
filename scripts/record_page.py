"""Writes docs/record.md from `gateway.observe.record_columns` and the columns of the parts:
`python scripts/record_page.py`. record_page.md beside this file is the template of the page."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from gateway.observe.columns import Column  # noqa: E402
from gateway.observe.record_columns import ATTEMPT, GROUPS  # noqa: E402
from gateway.part_list import COLUMNS  # noqa: E402

PAGE = ROOT / "docs/record.md"


def page() -> str:
    named = {**GROUPS, "Other parts": (*GROUPS["Other parts"], *COLUMNS)}
    groups = "\n\n".join(f"## {name}\n\n" + "\n".join(table(columns)) for name, columns in named.items())
    template = Path(__file__).with_suffix(".md").read_text("utf-8")
    return template.replace("{{groups}}", groups).replace("{{attempts}}", "\n".join(table(ATTEMPT)))


def table(columns: Iterable[Column[Any]]) -> Iterator[str]:
    yield from ("| name | unit | | meaning |", "|---|---|---|---|")
    for each in columns:
        yield f"| `{each.name}` | {each.unit} | {'' if each.csv is None else 'csv'} | {each.help} |"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
