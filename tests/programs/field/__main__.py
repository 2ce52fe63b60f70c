"""The transcript bench of the field.

    python -m tests.programs.field [--conversations N] [--sessions N] [--seed N] [--apis NAMES] [--write]
        [--alone | --further] [--without-facts] [--callers N] [--plain]

Generates conversations of eleven clients, sends them through a gateway to fakes of every API, which verify each request
and refuse in the API's words, and prints what was refused, altered or lost. `--apis`: separated by commas; `--write`:
the page benchmarks/field.md; `--plain`: without what few clients send. `--without-facts`: the gateway believes nothing
of models and APIs, and the page has the requests of a pool that were lost before a lesson held.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import monotonic

from tests.programs.field.page import page
from tests.programs.field.shares import Plan, carry_out

PAGE = Path(__file__).parents[3] / "benchmarks" / "field.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.field")
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--steps", type=int, default=200, help="of a session")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--apis", type=lambda text: tuple(text.split(",")), default=())
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=150)
    routes = parser.add_mutually_exclusive_group()
    routes.add_argument("--alone", dest="route", action="store_const", const="alone", help="routes with one pool each")
    routes.add_argument("--further", dest="route", action="store_const", const="further", help="with one that answers")
    parser.add_argument("--without-facts", action="store_true", help="empty tables, so that only lessons mend")
    parser.add_argument("--callers", type=int, default=1, choices=(1, 2), help="that take turns")
    parser.add_argument("--plain", action="store_true", help="without what few clients send")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    begun = monotonic()
    jobs = 1 if args.without_facts else args.jobs  # each gateway learns for itself
    whole = args.conversations, args.sessions, args.steps, args.seed, args.apis, jobs
    plan = Plan(*whole, args.route or "spare", args.without_facts, args.callers, not args.plain)
    text = page(plan, carry_out(plan), args.rows)
    print(text)
    print(f"{monotonic() - begun:.0f} s", file=sys.stderr)
    if args.write:
        PAGE.write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
