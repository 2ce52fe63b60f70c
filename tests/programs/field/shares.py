"""Divides a run of the bench among processes, each with a gateway of its own."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.programs.field.bench import Results, run, sessions


@dataclass(frozen=True)
class Plan:
    """`seed`: of the first conversation. `apis`: names; empty: all. `steps`: of a session. `alone`: routes have
    one pool each."""

    conversations: int
    sessions: int
    steps: int
    seed: int
    apis: tuple[str, ...]
    jobs: int
    alone: bool


@dataclass
class Found:
    """`long`: of sessions with changes of the model; `unanswered`: their steps without an answer."""

    short: Results = field(default_factory=Results)
    long: Results = field(default_factory=Results)
    unanswered: int = 0


def carry_out(plan: Plan) -> Found:
    found, end = Found(), plan.seed + plan.conversations
    with ProcessPoolExecutor(plan.jobs, get_context("spawn")) as pool:
        parts = [
            pool.submit(_run, range(plan.seed + job, end, plan.jobs), plan.apis, plan.alone) for job in range(plan.jobs)
        ]
        walks = [
            pool.submit(_walk, range(job, plan.sessions, plan.jobs), plan.steps, plan.alone) for job in range(plan.jobs)
        ]
        for part in parts:
            found.short.add(part.result())
        for walk in walks:
            results, unanswered = walk.result()
            found.long.add(results)
            found.unanswered += unanswered
    return found


def _run(seeds: range, apis: tuple[str, ...], alone: bool) -> Results:
    logging.disable(logging.WARNING)
    return asyncio.run(run(seeds, apis=apis, one_pool=alone))


def _walk(seeds: range, steps: int, alone: bool) -> tuple[Results, int]:
    logging.disable(logging.WARNING)
    return asyncio.run(sessions(seeds, steps, one_pool=alone))
