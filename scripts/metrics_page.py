"""Writes docs/metrics.md from `gateway.observe.metrics.metric_table`: `python scripts/metrics_page.py`.

`--check` only compares: exit code 1 if the page is out of date. metrics_page.md beside this file is the template of the
page."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from gateway.observe.metrics.metric_family import Family, MetricKind  # noqa: E402
from gateway.observe.metrics.metric_table import CATALOG, GROUPS  # noqa: E402

PAGE = ROOT / "docs/metrics.md"
TEMPLATE = Path(__file__).with_suffix(".md")


def page() -> str:
    groups = "\n\n".join("\n".join(group(name, families)) for name, families in GROUPS.items())
    template = TEMPLATE.read_text("utf-8")
    return template.replace("{{groups}}", groups).replace("{{buckets}}", "\n".join(buckets(CATALOG.values())))


def group(name: str, families: Iterable[Family]) -> Iterator[str]:
    yield from (f"## {name}", "", "| name | type | labels | unit | meaning |", "|---|---|---|---|---|")
    for row in families:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        yield f"| `{row.name}` | {row.kind} | {labels} | {row.unit} | {meaning(row)} |"
    yield from ("", "| name | causes of change | action |", "|---|---|---|")
    for row in families:
        yield f"| `{row.name}` | {row.moves} | {row.act} |"


def meaning(row: Family) -> str:
    return f"{row.help}. {row.more}".strip()


def buckets(families: Iterable[Family]) -> Iterator[str]:
    yield from ("| name | bounds |", "|---|---|")
    for row in families:
        if row.kind is MetricKind.HISTOGRAM:
            yield f"| `{row.name}` | {' '.join(f'{bound:g}' for bound in row.bounds)} |"


def main(arguments: list[str]) -> int:
    written = page()
    if arguments == ["--check"]:
        current = PAGE.read_text("utf-8") == written
        print(f"docs/metrics.md is {'up to date' if current else 'out of date: run scripts/metrics_page.py'}")
        return 0 if current else 1
    PAGE.write_text(written, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
