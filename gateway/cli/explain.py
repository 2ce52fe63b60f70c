"""`firsttoken explain`: the candidates of a request and the reasons for their ranks, as a table. No engine is asked.

With a configuration alone the decision is made on an untrained fleet; with the admin port of a running gateway, on the
fleet state of the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from backends.interface import Operation
from gateway.admin.admin_views import explain as in_words
from gateway.admin.admin_views import left_out_view, named_view
from gateway.admission.auth import ANYONE
from gateway.api import inference_request as ingress
from gateway.api.api_error import ApiError
from gateway.api.operation_fit import OperationFit
from gateway.cli.gateway_client import ask_admin, authorization, key_in
from gateway.cli.tables import aligned, printable, shortened, wrapped
from gateway.config.config_errors import ConfigError, file_errors
from gateway.config.loading import load
from gateway.config.models import Config
from gateway.part_list import CONFIG
from gateway.request_steps import Decider
from gateway.runtime import build_runtime, routes_of, tokenizers
from gateway.strict_json import BadJson, decode, encode
from gateway.tokenize.estimator import Estimator
from gateway.tokenize.tokenizers import EncoderError
from policies.fleet.fleet import Fleet

WIDTH = 100  # columns of the table
HEADING = ("", "endpoint", "tier", "p50", "p90", "chance", "hit", "ahead", "run+wait", "price")


def explain(args: argparse.Namespace) -> int:
    """Exit code 0; raises ConfigError where the request or the configuration is wrong."""
    files = list(args.files)
    if args.request is None and not files:
        raise ConfigError(["firsttoken: name the file of the request (see firsttoken explain --help)"])
    path = args.request or files.pop()  # `--config` also captures the request, as the last file
    body = _read(path, args.route)
    operation = Operation.COMPLETION if "prompt" in body and "messages" not in body else Operation.CHAT
    try:
        if args.admin:
            reply = _asked(args.admin, operation, encode(body), args.key_env)
        else:
            reply = asyncio.run(_decided(load(files, os.environ, CONFIG), operation, encode(body)))
    except ApiError as refusal:
        raise ConfigError([f"{path}: {refusal.message}"]) from None
    except EncoderError as error:
        raise ConfigError([str(error)]) from None
    print(json.dumps(reply, indent=2) if args.json else decision_table(reply))
    return 0


def _read(path: Path, route: str | None) -> dict[str, Any]:
    try:
        with file_errors(path, "read"):
            body = decode(path.read_bytes())
    except BadJson as error:
        raise ConfigError([f"{path}: not valid JSON: {error}"]) from None
    if not isinstance(body, dict):
        raise ConfigError([f"{path}: not a JSON object, which the body of a request is"])
    return body if route is None else {**body, "model": route}


async def _decided(config: Config, operation: Operation, raw: bytes) -> dict[str, Any]:
    pools, fleet = config.fleet(), Fleet(config.fleet())
    estimator = Estimator(tokenizers(config), fleet.view.token_scale)
    try:
        routes = routes_of(config)
        decider = Decider(estimator, fleet)
        estimator.warm()  # the clock starts with a gateway that is ready
        request = ingress.parse(operation, raw, {}, monotonic(), "explain", routes.wanted_headers())
        named = routes.match(request.model)
        route = named.route
        if (work := OperationFit().work(request, route, build_runtime(config).servers(named.model), raw)) is not None:
            work()
        estimate = await decider.estimate(request, route, ANYONE)
        decision = decider.decide(request, route, estimate, ANYONE, 1)
        beliefs = fleet.view.beliefs(fleet.snapshot(decision.at).loads, decision.at)
        found = in_words(decision, estimate, {}, {pool.name: pool for pool in pools}, beliefs)
        return {**named_view(request.model, named), **found, **left_out_view(request)}
    finally:
        estimator.close()


def _asked(admin: str, operation: Operation, raw: bytes, key_variable: str | None) -> dict[str, Any]:
    """Asks a running gateway."""
    headers = {"content-type": "application/json", **authorization(key_in(key_variable))}
    reply: dict[str, Any] = ask_admin(admin, f"/explain?path={operation.value}", raw, headers)
    return reply


def decision_table(reply: Mapping[str, Any]) -> str:
    """The reply of POST /explain as text: a line of numbers and a line of words per endpoint."""
    lines = [line for text in _known(reply) for line in _wrapped(text, "")]
    if reply["candidates"]:
        lines += ["", *_ranked(reply["candidates"])]
    if reply["rejected"]:
        lines += ["", "rejected"]
    for found in reply["rejected"]:
        lines += _wrapped(f"{found['endpoint'] or found['pool']} (tier {found['tier']}): {found['reason']}", "   ")
    if learned := [*_learned(reply)]:
        lines += ["", "learned by refusals", *learned]
    if believed := reply.get("believed"):
        lines += ["", "believed", *_believed(believed)]
    return "\n".join(lines)


def _learned(reply: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the lessons on what the pools would be asked for, of a running gateway."""
    for pool, asked in reply.get("pools", {}).items():
        for each in asked.get("lessons", ()):
            if (each["model"], each["operation"]) == (asked["model"], asked["operation"]):
                whom = "all callers" if each["callers"] == "all" else f"{each['callers']} of the callers"
                yield from _wrapped(printable(f"{pool}: {each['lesson']}, for {whom}, for {each['left_s']} s"), "   ")


def _believed(by_endpoint: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Lines of the beliefs that keep requests away from endpoints."""
    lines: list[str] = []
    for endpoint, beliefs in by_endpoint.items():
        for found in beliefs:
            lasts = "" if found["for_s"] is None else f", for {found['for_s']:.0f} s"
            whom = "all callers" if found["callers"] == "all" else f"{found['callers']} of the callers"
            lines += _wrapped(f"{endpoint}: {found['what']}{lasts}, to {whom}: {found['why']}", "   ")
    return lines


def _known(reply: Mapping[str, Any]) -> list[str]:
    """The outcome, the request, and the remaining budget."""
    pools: dict[int, list[str]] = {}
    for pool, tokens in reply["prompt_tokens"].items():
        pools.setdefault(tokens, []).append(pool)
    prompts = ", ".join(f"{tokens} tokens ({', '.join(names)})" for tokens, names in pools.items())
    left = reply["budget_left_ms"]
    uncached = reply.get("uncached_tokens")
    grown = f", of a budget that counts {uncached} uncached tokens" if uncached else ""
    budget = "no TTFT budget" if left is None else f"{left:.0f} ms left for the first token{grown}"
    held, hold = sum(reply["held_now"].values()), reply.get("held_by")
    waiting = f"; {held} requests are held back" if held else ""
    return [
        *_named(reply),
        f"{reply['outcome']}: {reply['reason']}",
        f"prompt: {prompts}; {reply['expected_output_tokens']} tokens of answer expected",
        f"budget: {budget}{waiting}",
        *([f"held by {hold['rule']} at {hold['endpoint']}; freed by {hold['freed_by']}"] if hold else []),
    ]


def _named(reply: Mapping[str, Any]) -> list[str]:
    """A line with the route's name, if different from the requested model."""
    asked, route, via = (reply.get(key) for key in ("asked", "route", "via"))
    if asked == route or route is None:
        return []
    return [f"route: {route}, for the model {asked!a}" + (f" (matches {via})" if via not in (None, asked) else "")]


def _ranked(candidates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names stand left, numbers right; a name gives way where a line would be too long."""
    whole = any(candidate.get("total_p90_ms") is not None for candidate in candidates)
    heads = (*HEADING[:5], "whole p50", "p90", *HEADING[5:]) if whole else HEADING
    rows = [heads, *(_row(candidate, whole) for candidate in candidates)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = WIDTH - sum(widths) + widths[1] - 2 * (len(widths) - 1)
    heading, *lines = aligned([(rank, shortened(name, room), *rest) for rank, name, *rest in rows], left={1})
    found = [heading]
    for line, candidate in zip(lines, candidates, strict=True):
        verdict = f"{'chosen: ' if candidate['chosen'] else ''}{candidate['reason']}"
        found += [line, *_wrapped(verdict, " " * (widths[0] + 2))]
    return found


def _row(found: Mapping[str, Any], whole: bool) -> tuple[str, ...]:
    """`whole`: with the whole answer."""
    totals = [found.get("total_p50_ms"), found.get("total_p90_ms")] if whole else []
    return (
        str(found["rank"]),
        found["endpoint"],
        str(found["tier"]),
        f"{found['ttft_p50_ms']:.0f} ms",
        f"{found['ttft_p90_ms']:.0f} ms",
        *("-" if total is None else f"{total / 1e3:.1f} s" for total in totals),
        f"{found['chance']:.3f}",
        f"{found['hit_tokens']}/{found['prompt_tokens']}",
        str(found["tokens_ahead"]),
        f"{found['running']}+{found['waiting']}",
        f"${found['price_usd']:.6f}",
    )


def _wrapped(text: str, indent: str) -> list[str]:
    return wrapped(text, WIDTH, indent)
