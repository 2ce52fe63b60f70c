"""TTFT that the judging of openings adds, beside what the forecast counts for it: `python -m benchmarks.held_openings`.

A gateway over simulated engines on sockets, in real time; callers arrive at random at two routes of the same tiers, of
which one holds the first 40 tokens of each stream back. `added`: by the Records' own stage between the first token in
and the end of the opening. `counted`: mean of the predicted TTFT of the held requests, less that of the plain ones,
which have prompts of the same lengths. `error`: median of |TTFT / predicted TTFT - 1|, TTFT to the first token written
to the caller.

With `--prose DIR...`: sentences in the texts and programs below these folders, and those taken for refusals.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from statistics import fmean, median, quantiles
from typing import Any

import aiohttp

from gateway.app import Gateway
from gateway.observe.record import JUDGE, Record
from policies.escalation.refusal_text import begins_with_refusal
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines

HOLD = 40  # tokens
WARM_UP = 20  # requests of each route, which teach and are not counted
TEXTS, MOST_READ = (".py", ".md", ".txt", ".rst", ".html"), 2_000_000  # kinds of files, and bytes of one
ROUTES: dict[str, dict[str, Any]] = {"plain": {}, "held": {"escalate": {"when": ["refusal_text"], "hold": HOLD}}}


async def ask(client: aiohttp.ClientSession, url: str, route: str, words: int, number: int) -> None:
    message = {"role": "user", "content": f"{number} " + "word " * words}
    body = {"model": route, "stream": True, "max_tokens": 120, "messages": [message]}
    async with client.post(f"{url}/v1/chat/completions", json=body) as reply:
        await reply.read()


async def load(gateway: Gateway, requests: int, rate: float, seed: int) -> Sequence[Record]:
    """Records of Poisson arrivals, of both routes in turn."""
    random, asked = Random(seed), list[asyncio.Task[None]]()
    async with aiohttp.ClientSession() as client:
        for number in range(requests):
            words = random.randint(20, 800)
            for route in ROUTES:
                asked.append(asyncio.create_task(ask(client, gateway.url, route, words, number)))
                await asyncio.sleep(random.expovariate(rate))
        await asyncio.gather(*asked)
    await asyncio.sleep(0.2)
    return list(gateway.recorder.recent)[-2 * requests :]


async def measured(profile: str, requests: int, rate: float, seed: int) -> Sequence[Record]:
    common = {"tiers": ["small", "large"], "ttft": {"budget": "3s"}, "hedge": "off"}
    routes = {name: common | route for name, route in ROUTES.items()}
    async with engines(2, profile) as servers:
        pools = dict(zip(("small", "large"), map(engine_pool, servers), strict=True))
        async with running(pools, routes) as gateway:
            await load(gateway, WARM_UP, rate, seed)
            return await load(gateway, requests, rate, seed + 1)


def row(profile: str, rate: float, records: Sequence[Record]) -> str:
    plain, held = ([each for each in records if each.route == name and each.ttft] for name in ROUTES)
    added = [(each.spent[JUDGE] or 0.0) * 1e3 for each in held]
    counted = (_predicted(held) - _predicted(plain)) * 1e3
    cells = [
        *(f"{median(each.ttft or 0.0 for each in group) * 1e3:.0f}" for group in (plain, held)),
        f"{fmean(added):.0f} (p90 {quantiles(added, n=10)[-1]:.0f})",
        f"{counted:.0f}",
        *(f"{median(map(_error, group)):.1%}" for group in (plain, held)),
    ]
    return f"| {profile}, {rate:g}/s | {len(held)} | {' | '.join(cells)} |"


def _predicted(records: Sequence[Record]) -> float:
    return fmean(each.ttft_predicted_p50 or 0.0 for each in records)


def _error(record: Record) -> float:
    return abs((record.ttft or 0.0) / (record.ttft_predicted_p50 or 1.0) - 1)


def sentences(folder: Path) -> Iterator[str]:
    for file in folder.rglob("*"):
        if file.suffix in TEXTS and file.is_file() and file.stat().st_size < MOST_READ:
            text = file.read_text("utf-8", "replace")
            found = (each.strip(" #*\"'") for each in re.split(r"(?<=[.!?])\s+|\n", text))
            yield from (each for each in found if len(each) >= 20 and each.count(" ") >= 3)


def read_prose(folders: Sequence[str]) -> None:
    read, taken = 0, list[str]()
    for each in chain.from_iterable(sentences(Path(folder)) for folder in folders):
        read += 1
        taken += [each] if begins_with_refusal(each) else []
    print(f"{read} sentences, {len(taken)} taken for refusals", *taken[:20], sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=80, help="of each route")
    parser.add_argument("--rates", default="1,4,8", help="arrivals per second, of both routes")
    parser.add_argument("--profiles", default="8b-h100,8b-l4")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prose", nargs="+", metavar="DIR")
    args = parser.parse_args()
    if args.prose:
        read_prose(args.prose)
        return
    print("| engines, load | n | TTFT plain, ms | held | added, ms | counted, ms | error plain | error held |")
    print("|---|---|---|---|---|---|---|---|")
    for profile in args.profiles.split(","):
        for rate in map(float, args.rates.split(",")):
            print(row(profile, rate, asyncio.run(measured(profile, args.requests, rate, args.seed))), flush=True)


if __name__ == "__main__":
    main()
