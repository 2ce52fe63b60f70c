"""Runs real clients against a gateway.

    python -m tests.programs.clients [--only NAMES] [--check NAME] [--engine DIALECT] [--page FILE]

NAMES are clients of versions.toml, separated by commas; without --only, all. Clients not installed are left out:
`python -m scripts.clients_setup` installs clients. The page keeps the former results of clients not run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tests.programs.clients import page, vllm_engines
from tests.programs.clients.manifest import Client, clients
from tests.programs.clients.run import ENGINES, VLLM, ClientRun, gateway, prepare, run


async def run_all(engine: str, chosen: list[Client], checks: tuple[str, ...]) -> dict[str, ClientRun]:
    """Run one client after the other: all requests at the engine are the client's."""
    runs = {}
    async with gateway(engine) as settings:
        for client in chosen:
            if not client.installed:
                print(f"{client.name}: not installed (python -m scripts.clients_setup {client.name})", file=sys.stderr)
                continue
            more = vllm_engines.left_out(client.name) if engine == VLLM else {}
            runs[client.name] = await run([*prepare(client), *checks], settings | more)
            report(client.name, runs[client.name])
    return runs


def report(name: str, found: ClientRun) -> None:
    versions = ", ".join(f"{package} {version}" for package, version in found.versions.items())
    total = len(found.passed) + len(found.failed)
    print(f"{name} ({versions}): {len(found.passed)} of {total} checks pass {found.ended}", flush=True)
    for check, reason in found.failed.items():
        print(f"    {check}: {reason}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.clients", description="Run real clients against a gateway."
    )
    parser.add_argument("--only", default="", metavar="NAMES", help="such as openai-python,codex")
    parser.add_argument("--check", action="append", default=[], metavar="NAME", help="a check, may be repeated")
    parser.add_argument("--engine", action="append", choices=(*ENGINES, VLLM), help="both dialects if absent")
    parser.add_argument("--page", type=Path, help="write the results to this file")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else [client.name for client in clients()]
    if unknown := set(names) - {client.name for client in clients()}:
        parser.error(f"unknown client: {', '.join(sorted(unknown))}")
    chosen = [client for client in clients() if client.name in names]
    green = True
    for engine in args.engine or ENGINES:
        print(f"in front of a {page.TITLES[engine]}", flush=True)
        runs = asyncio.run(run_all(engine, chosen, tuple(args.check)))
        green = green and len(runs) == len(chosen) and all(found.green(engine) for found in runs.values())
        if args.page:
            page.write(args.page, engine, runs)
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
