"""The requests of a LiteLLM file through a proxy, and the provider that answered each."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from tests.support.litellm_files import MASTER_KEY, REQUESTS, LitellmFile

KEPT = Path(__file__).parents[1] / "gateway" / "cli" / "importing" / "litellm_answers.json"
TOLERANCE = 0.15  # of a provider's share
_ANSWER = re.compile(r"([a-z]+\d?) answers")


async def answered_by(url: str, file: LitellmFile, requests: int = REQUESTS) -> list[str]:
    """By request: the provider whose answer came, or the status of a refusal."""
    timeout = aiohttp.ClientTimeout(total=120)
    at_once = asyncio.Semaphore(file.concurrent)
    async with aiohttp.ClientSession(timeout=timeout, headers={"authorization": f"Bearer {MASTER_KEY}"}) as session:

        async def ask(number: int) -> str:
            async with at_once, session.post(f"{url}/chat/completions", json=file.body(number)) as response:
                text = await response.text()
                found = _ANSWER.search(text)
                return found[1] if response.status == 200 and found else str(response.status)

        return await asyncio.gather(*map(ask, range(requests)))


def groups(answers: Sequence[str]) -> list[str]:
    """Groups in place of providers, and one word for every failure of a server: LiteLLM repeats its 500, we say 502."""
    return ["5xx" if re.fullmatch(r"5\d\d", answer) else answer.rstrip("0123456789") or answer for answer in answers]


def unlike(file: LitellmFile, expected: Sequence[str], answers: Sequence[str]) -> list[str]:
    """Requests that another group answered than the one expected, and shares of providers that are not the file's."""
    found = [
        f"request {number}: {ours}, expected {theirs}"
        for number, (theirs, ours) in enumerate(zip(expected, groups(answers), strict=True))
        if theirs != ours
    ]
    counts = Counter(answer for answer in answers if answer in file.spread)
    for provider, share in file.spread.items():
        if abs(counts[provider] / max(counts.total(), 1) - share) > TOLERANCE:
            found.append(f"{provider} answered {counts[provider]} of {counts.total()}, {share:.0%} expected")
    return found


def kept() -> dict[str, list[str]]:
    """Groups that LiteLLM was seen to answer with, by file: runs of the same are written as `group*times`."""
    found = json.loads(KEPT.read_text())
    return {name: [group for run in runs.split() for group in _run(run)] for name, runs in found["groups"].items()}


def _run(run: str) -> list[str]:
    group, _, times = run.partition("*")
    return [group] * int(times or 1)


def keep(version: str, found: dict[str, list[str]]) -> None:
    """Write the rows of these files into the table of `kept`. Rows of another version of LiteLLM go."""
    table = json.loads(KEPT.read_text())
    lines: dict[str, str] = table["groups"] if table["litellm"] == version else {}
    for name, answers in found.items():
        runs: list[list[str]] = []
        for group in answers:
            if runs and runs[-1][0] == group:
                runs[-1].append(group)
            else:
                runs.append([group])
        lines[name] = " ".join(f"{run[0]}*{len(run)}" if len(run) > 1 else run[0] for run in runs)
    KEPT.write_text(json.dumps({"litellm": version, "groups": lines}, indent=1) + "\n")
