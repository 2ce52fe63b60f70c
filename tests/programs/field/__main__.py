"""The transcript bench of the field: `python -m tests.programs.field [CONVERSATIONS] [--sessions N] [--write]`."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from time import process_time

from tests.programs.field.bench import LOST, REFUSED, Results, run, sessions

PAGE = Path(__file__).parents[3] / "benchmarks" / "field.md"


def table(results: Results, most: int) -> str:
    lines = ["| requests | API | class | kind | smallest example |", "|---|---|---|---|---|"]
    for (api, form, kind), count in results.counts.most_common(most):
        example = results.examples[api, form, kind].replace("|", "/").replace("`", "'").replace("\n", " ")
        lines.append(f"| {count} | {api} | {form} | {kind.replace('|', '/')} | `{example[:260]}` |")
    return "\n".join(lines)


def summary(results: Results) -> str:
    lines = [
        "| API | requests | refused for what could have been mended | kinds | state lost |",
        "|---|---|---|---|---|",
    ]
    for api, asked in results.requests.items():
        kinds = {key for key in results.counts if key[0] == api and key[1] == REFUSED}
        lost = sum(count for (name, form, _), count in results.counts.items() if (name, form) == (api, LOST))
        lines.append(f"| {api} | {asked} | {results.refused[api]} | {len(kinds)} | {lost} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.field")
    parser.add_argument("conversations", nargs="?", type=int, default=2000)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--rows", type=int, default=150)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    begun = process_time()
    results = run(args.conversations)
    long, unanswered = sessions(args.sessions, 200)
    asked, steps = sum(results.requests.values()), sum(long.requests.values())
    text = "\n\n".join(
        [
            "# The field",
            f"Written by `python -m tests.programs.field {args.conversations} --sessions {args.sessions} --write`, "
            f"{datetime.now(UTC):%Y-%m-%d}: {args.conversations} conversations before {len(results.requests)} APIs, "
            f"{asked} requests, {process_time() - begun:.0f} s of CPU.",
            f"Conversations and APIs with a request that was refused for a member, a form or an order: "
            f"{len(results.broken)} of {args.conversations * len(results.requests)}.",
            summary(results),
            f"Sessions of 200 steps with changes of the model: {sum(long.refused.values())} of {steps} steps refused, "
            f"{unanswered} without an answer, "
            f"{sum(n for (_, form, _), n in long.counts.items() if form == LOST)} blocks lost.",
            "## Kinds of refusals",
            table(results, args.rows),
            "## Kinds in long sessions",
            table(long, 60),
        ]
    )
    print(text)
    if args.write:
        PAGE.write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
