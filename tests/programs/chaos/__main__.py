"""`python -m tests.programs.chaos [--only ROWS] [--title TEXT] [--quick] [--page FILE]` runs the catalogue.

ROWS are numbers and ranges: 1,4-9. TEXT is a part of a title, for one row of a number that several rows share. Without
--only and --title, all rows. The page keeps the former figures of rows not run.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import uvloop

from benchmarks.processes import ROOT
from gateway.process import raise_file_limit
from tests.programs.chaos import catalogue, page
from tests.programs.chaos.rows import Outcome, Row, chosen, run


def numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


async def run_all(rows: list[Row], quick: bool, target: Path | None) -> list[Outcome]:
    """Write the page after every row: a stopped run keeps the figures so far."""
    outcomes = []
    for each in rows:
        print(f"{each.number:>3} {each.title} ...", file=sys.stderr, flush=True)
        outcome = await run(each, quick)
        outcomes.append(outcome)
        if target is not None:
            page.write(target, [outcome], quick=quick)
        print(f"    {outcome.result.figures} | {outcome.verdict} ({outcome.seconds:.0f} s)", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.chaos", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--only", type=numbers, default=[], metavar="ROWS", help="such as 1,4-9")
    parser.add_argument("--title", default="", metavar="TEXT", help="rows whose title has this text alone")
    parser.add_argument("--quick", action="store_true", help="smaller numbers")
    parser.add_argument("--page", type=Path, help="write the results to this file")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    logging.disable(logging.WARNING)
    raise_file_limit()
    assert catalogue.ROWS
    rows = [each for each in chosen(args.only) if args.title in each.title]
    outcomes = uvloop.run(run_all(rows, args.quick, args.page))
    short = [outcome for outcome in outcomes if not outcome.passed]
    print(f"{len(outcomes) - len(short)} rows pass, {len(short)} fall short")
    return 0


if __name__ == "__main__":
    sys.exit(main())
