"""`firsttoken replay --live URL TRACE...`: recorded traffic in real time against any OpenAI-compatible address."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from pydantic import ValidationError

from backends.interface import FailureKind
from gateway.cli.live.live_facts import harmless
from gateway.cli.live.live_findings import mend_of
from gateway.config.config_errors import ConfigError
from gateway.config.loading import load
from gateway.config.models import Config
from gateway.part_list import CONFIG
from gateway.process import loop_factory, raise_file_limit
from lab.live.attainment import attainments
from lab.live.live_player import POOL, LiveAnswer, LivePlayer, ReplayAborted, live_server
from lab.live.live_report import announcement, report
from lab.live.trace_prompts import TracePrompts
from lab.traffic.traces import Arrival, TraceError, at_load
from lab.traffic.traffic import Traffic, TrafficSource
from policies.routes.route import Ttft, seconds

LONGEST = 1_000_000  # tokens of a prompt
VIRTUAL = {  # options of a replay in virtual time, by default
    "files_b": [],
    "load": "1",
    "seeds": 1,
    "closed": False,
    "score_per_1k": None,
    "scorers": "all",
    "no_reference": False,
    "workers": None,
    "replicas": None,
    "news": "2ms",
    "what_if": [],
    "html": None,
    "worst": 0,
    "fault": [],
}


def replay_live(args: argparse.Namespace) -> int:
    """Raises ConfigError if an argument or the trace is wrong, or nobody answers at the address."""
    if set_ := [name for name, default in VIRTUAL.items() if getattr(args, name) != default]:
        option = "--config-b" if set_[0] == "files_b" else f"--{set_[0].replace('_', '-')}"
        raise _error(f"{option} belongs to a replay in virtual time: leave it out, or leave --live out")
    key = _key(args)
    config, budgets = _server_config(args.live, key), _budgets(args)
    arrivals = _arrivals(args, budgets)
    tokens = (sum(arrival.prompt_tokens for arrival in arrivals), sum(arrival.output_tokens for arrival in arrivals))
    print(announcement(args.live, *tokens, len(arrivals), arrivals[-1].at), file=sys.stderr, flush=True)
    answers = _played(config, arrivals, args, (key,) if key else ())
    rows = attainments(answers, {arrival.route: _budget(budgets, arrival.route) for arrival in arrivals})
    if args.json:
        print(json.dumps([row.as_json() for row in rows], indent=2))
    else:
        print("\n".join(report(rows, answers, (key,) if key else ())))
    return 0


def _played(
    config: Config, arrivals: Sequence[Arrival], args: argparse.Namespace, secrets: Sequence[str]
) -> list[LiveAnswer]:
    """Answers so far, where the user has interrupted the replay. Raises ConfigError where nobody answers."""
    answers: list[LiveAnswer] = []

    async def play() -> None:
        async with live_server(config, args.timeout or 300.0) as server:
            prompts = TracePrompts(arrivals[0].block)
            await LivePlayer(server, prompts, answers, args.model or "").play(arrivals)

    raise_file_limit()
    with suppress(KeyboardInterrupt):
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(play())
        except ReplayAborted as aborted:
            raise _error(_why(args.live, aborted, secrets)) from None
    return answers


def _why(url: str, aborted: ReplayAborted, secrets: Sequence[str]) -> str:
    said, kind = harmless(str(aborted), secrets), aborted.failure.kind
    if kind is FailureKind.AUTH:
        mend = "correct the key" if secrets else "add --key KEY, or --key-env NAME"
        return f"{url}: {'refuses' if secrets else 'wants'} the key: {said}; {mend}"
    if kind is FailureKind.MISCONFIGURED:
        return f"{url}: {said}; correct the model (MODEL=TRACE, or --model NAME) or the path of the URL"
    return f"{url}: {said}; {mend_of(said)}"


# ---------------------------------------------------------------- arguments


def _error(message: str) -> ConfigError:
    return ConfigError([f"firsttoken: {message}"])


def _key(args: argparse.Namespace) -> str:
    if args.key_env is None:
        return args.key or ""
    if not (key := os.environ.get(args.key_env, "")):
        raise _error(f"--key-env {args.key_env}: the variable is not set")
    return key


def _server_config(url: str, key: str) -> Config:
    """A configuration with the address as the only endpoint."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.username is None
    except ValueError:
        usable = None
    if not usable:
        raise _error("--live: write a URL such as http://127.0.0.1:8080, without a user")
    pool = {"backend": "compatible", "model": POOL, "endpoints": [url], **({"api_key": key} if key else {})}
    try:
        return Config.model_validate({"pools": {POOL: pool}, "defaults": {"connect": "10s"}})
    except ValidationError as error:
        raise _error(f"--live {url}: {error.errors()[0]['msg']}") from None


def _budgets(args: argparse.Namespace) -> Mapping[str, Ttft | None] | Ttft:
    """By route, of the configuration; or one for all."""
    if args.ttft is not None:
        try:
            if seconds(args.ttft) <= 0:
                raise ValueError("must be above 0")
            return Ttft.model_validate({"budget": args.ttft})
        except ValueError as error:
            raise _error(f"--ttft {args.ttft}: {error}") from None
    if not args.files:
        raise _error("no budget: add --ttft TIME, such as 800ms, or --config FILE with the routes")
    return {route.name: route.ttft for route in load(args.files, os.environ, CONFIG).all_routes}


def _budget(budgets: Mapping[str, Ttft | None] | Ttft, route: str) -> Ttft | None:
    return budgets if isinstance(budgets, Ttft) else budgets.get(route)


def _arrivals(args: argparse.Namespace, budgets: Mapping[str, Ttft | None] | Ttft) -> list[Arrival]:
    """In order of time. Raises ConfigError for a wrong trace."""
    sources = tuple(map(TrafficSource.parse, args.traces))
    traffic = Traffic(sources, args.limit, args.seconds, args.sessions)
    try:
        routes = list(_named(sources, args)) if isinstance(budgets, Ttft) else list(budgets)
        arrivals = at_load(traffic.arrivals(routes, 1.0, args.seed), args.speed or 1.0)
    except TraceError as error:
        raise _error(str(error)) from None
    if not arrivals:
        raise _error("no request left to replay; raise --seconds or --limit")
    if (longest := max(arrival.prompt_tokens for arrival in arrivals)) > LONGEST:
        raise _error(f"a prompt of {longest:,} tokens: at most {LONGEST:,} can be sent")
    return arrivals


def _named(sources: Sequence[TrafficSource], args: argparse.Namespace) -> dict[str, None]:
    """Routes that the command line or the traces name. Raises TraceError where one names none."""
    names: dict[str, None] = {}
    for source in sources:
        found = [source.route] if source.route else [each.route for each in source.arrivals(1.0, args.seed, args.limit)]
        names |= dict.fromkeys(name or args.model for name in found)
    if None in names:
        raise TraceError("the trace names no model: write MODEL=TRACE, or add --model NAME")
    return names
