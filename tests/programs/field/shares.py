"""Divides a run of the bench among processes, each with a gateway of its own."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.programs.field.bench import Results, run, sessions
from tests.programs.field.callers import alone, with_further, with_spare
from tests.programs.field.emptied import believe_nothing

# Routes to a target: its pool alone, another one behind that never answers, or one that always does.
ROUTES = {"alone": alone, "spare": with_spare, "further": with_further}


@dataclass(frozen=True)
class Plan:
    """`seed`: of the first conversation and of the first session. `apis`: names; empty: all. `steps`: of a session.
    `route`: a name of ROUTES. `callers`: API keys that take turns. `odd`: some clients send what few do."""

    conversations: int
    sessions: int
    steps: int
    seed: int
    apis: tuple[str, ...]
    jobs: int
    route: str = "spare"
    without_facts: bool = False
    callers: int = 1
    odd: bool = True


@dataclass
class Found:
    """`long`: of sessions with changes of the model; `unanswered`: their steps without an answer."""

    short: Results = field(default_factory=Results)
    long: Results = field(default_factory=Results)
    unanswered: int = 0


def carry_out(plan: Plan) -> Found:
    found, end = Found(), plan.seed + plan.conversations
    with ProcessPoolExecutor(plan.jobs, get_context("spawn")) as pool:
        parts = [pool.submit(_run, range(plan.seed + job, end, plan.jobs), plan) for job in range(plan.jobs)]
        last = plan.seed + plan.sessions
        walks = [pool.submit(_walk, range(plan.seed + job, last, plan.jobs), plan) for job in range(plan.jobs)]
        for part in parts:
            found.short.add(part.result())
        for walk in walks:
            results, unanswered = walk.result()
            found.long.add(results)
            found.unanswered += unanswered
    return found


def _run(seeds: range, plan: Plan) -> Results:
    _prepare(plan)
    return asyncio.run(run(seeds, apis=plan.apis, route=ROUTES[plan.route], callers=plan.callers, odd=plan.odd))


def _walk(seeds: range, plan: Plan) -> tuple[Results, int]:
    _prepare(plan)
    return asyncio.run(sessions(seeds, plan.steps, route=ROUTES[plan.route]))


def _prepare(plan: Plan) -> None:
    logging.disable(logging.WARNING)
    if plan.without_facts:
        believe_nothing()
