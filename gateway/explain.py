"""`firsttoken explain`: where a request would go, and why, as a table. Nothing is sent to any server of the fleet.

With a configuration alone, it is decided on a fleet of which nothing is known yet; with the admin port of a running
gateway, on what that has learned.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from backends.interface import Operation
from gateway import ingress
from gateway.app import tokenizers
from gateway.config.loading import load
from gateway.config.models import Config
from gateway.config.problems import ConfigError
from gateway.config.report import aligned
from gateway.decider import Decider
from gateway.estimate.encoders import EncoderError
from gateway.estimate.estimator import Estimator
from gateway.keys import ANYONE
from gateway.monitor import Monitor
from gateway.observe.explain import explain as in_words
from gateway.refusal import Refusal
from gateway.routes import Routes
from gateway.strictjson import BadJson, decode, encode
from policies.fleet import Fleet

PATIENCE = 10.0  # s that a running gateway may take to answer
HEADING = ("", "endpoint", "tier", "p50", "p90", "tpot", "chance", "hit", "price", "reason")


def explain(args: argparse.Namespace) -> int:
    """Exit code 0; raises ConfigError where the request or the configuration is wrong."""
    path, files = _request_file(args)
    body = _read(path, args.route)
    operation = Operation.COMPLETION if "prompt" in body and "messages" not in body else Operation.CHAT
    try:
        said = (
            _asked(args.admin, operation, encode(body))
            if args.admin
            else asyncio.run(_decided(load(files, os.environ), operation, encode(body)))
        )
    except Refusal as refusal:
        raise ConfigError([f"{path}: {refusal.message}"]) from None
    except EncoderError as error:
        raise ConfigError([str(error)]) from None
    print(json.dumps(said, indent=2) if args.json else table(said))
    return 0


def _request_file(args: argparse.Namespace) -> tuple[Path, list[Path]]:
    """`--config` takes what follows it, and the request with it: the last file is the request."""
    files = list(args.files)
    if args.request is not None:
        return args.request, files
    if not files:
        raise ConfigError(["firsttoken: name the file of the request (see firsttoken explain --help)"])
    return files.pop(), files


def _read(path: Path, route: str | None) -> dict[str, Any]:
    try:
        body = decode(path.read_bytes())
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except BadJson as error:
        raise ConfigError([f"{path}: not valid JSON: {error}"]) from None
    if not isinstance(body, dict):
        raise ConfigError([f"{path}: not a JSON object, which the body of a request is"])
    return body if route is None else {**body, "model": route}


# -- two ways to an answer ------------------------------------------------------------------


async def _decided(config: Config, operation: Operation, raw: bytes) -> dict[str, Any]:
    pools, fleet = config.fleet(), Fleet(config.fleet())
    estimator = Estimator(tokenizers(config), fleet.token_scale)
    try:
        routes = Routes(config.routes, config.passthrough_route)
        every_route = [*config.routes.values(), *([routes.passthrough] if routes.passthrough else [])]
        decider = Decider(estimator, Monitor(fleet), pools, every_route)
        estimator.warm()  # the clock starts with a gateway that is ready
        request = ingress.parse(operation, raw, {}, monotonic(), "explain", decider.wanted_headers)
        route = routes.match(request.model)
        estimate = await decider.estimate(request, route, ANYONE)
        return in_words(decider.decide(request, route, estimate, ANYONE, 1), estimate, {})
    finally:
        estimator.close()


def _asked(admin: str, operation: Operation, raw: bytes) -> dict[str, Any]:
    url = f"{admin.rstrip('/')}/explain?path={operation.value}"
    try:
        with urlopen(Request(url, raw, {"content-type": "application/json"}), timeout=PATIENCE) as reply:
            said: dict[str, Any] = json.load(reply)
            return said
    except HTTPError as error:
        raise ConfigError([f"{admin}: {_reason(error)}"]) from None
    except (URLError, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise ConfigError([f"{admin}: this is not the admin port of a running gateway: {reason}"]) from None


def _reason(error: HTTPError) -> str:
    """In the gateway's own words, where it is one."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"


# -- for people -----------------------------------------------------------------------------


def table(said: dict[str, Any]) -> str:
    """What POST /explain says, to be read."""
    lines = [f"{said['outcome']}: {said['reason']}", _known(said)]
    if said["candidates"]:
        lines += ["", *aligned([HEADING, *map(_row, said["candidates"])])]
    if said["rejected"]:
        lines += ["", *aligned([("rejected", "tier", "reason"), *map(_rejected, said["rejected"])])]
    return "\n".join(lines)


def _known(said: dict[str, Any]) -> str:
    prompts = ", ".join(f"{tokens} tokens ({pool})" for pool, tokens in said["prompt_tokens"].items())
    left = said["budget_left_ms"]
    budget = "no TTFT budget" if left is None else f"{left:.0f} ms left for the first token"
    held = sum(said["held_now"].values())
    waiting = f"; {held} requests are held back" if held else ""
    return f"prompt {prompts}; {said['expected_output_tokens']} tokens of answer expected; {budget}{waiting}"


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(found["rank"]), found["endpoint"], str(found["tier"]), f"{found['ttft_p50_ms']:.0f} ms",
        f"{found['ttft_p90_ms']:.0f} ms", f"{found['tpot_ms']:.1f} ms", f"{found['chance']:.3f}",
        f"{found['hit_tokens']}/{found['prompt_tokens']}", f"${found['price_usd']:.6f}", found["reason"],
    )  # fmt: skip


def _rejected(found: dict[str, Any]) -> tuple[str, ...]:
    return found["endpoint"] or found["pool"], str(found["tier"]), found["reason"]
