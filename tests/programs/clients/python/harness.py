"""Runs the checks of a client, and prints a JSON line for each. Needs the standard library alone.

    @check("chat")
    def chat() -> None:
        expect(answer.text == TEXT, answer)

    main("openai")

Settings of a client are BASE_URL, API_KEY and MODEL only. ENGINE is the address of the simulated engine: a check reads
the engine's requests there.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

BASE_URL = os.environ["BASE_URL"]  # with /v1
ROOT_URL = BASE_URL.removesuffix("/v1")
API_KEY = os.environ["API_KEY"]
MODEL = os.environ["MODEL"]
ENGINE = os.environ["ENGINE"]
IMAGE = os.environ["IMAGE"]  # base64 of a PNG
IMAGE_SEEN = os.environ["IMAGE_SEEN"]  # the engine's description of IMAGE
TEXT = os.environ["TEXT"]
REASONING = os.environ["REASONING"]
TEXT_TOKENS = int(os.environ["TEXT_TOKENS"])  # in the engine's count
REASONING_TOKENS = int(os.environ["REASONING_TOKENS"])
TURN = "Which turn is this?"
LEFT_OUT = json.loads(os.environ.get("LEFT_OUT", "{}"))  # the reason by the end of the names of checks not to be run
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CITIES = "What is the weather in Paris and Rome?"
LONG = "Remember these words. " + " ".join(f"word{i}" for i in range(200))
STATEFUL_TURNS = [(f"turn 1 of {name}", f"turn 2 of {name}") for name in "ab"]  # of the route `stateful`
WITHIN = 20.0  # s for a check

_checks: dict[str, Callable[[], Any]] = {}


def check(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a check. Functions may be async."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        assert name not in _checks, name
        _checks[name] = function
        return function

    return register


def expect(holds: object, shown: object) -> None:
    """Fail with `shown` unless `holds`."""
    if not holds:
        raise AssertionError(str(shown)[:600])


def raises(kind: type[BaseException], call: Callable[[], Any]) -> Any:
    """Return the exception of the call; fail for any other exception, and for none."""
    try:
        returned = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}: returned {str(returned)[:300]}")


def seen() -> dict[str, Any]:
    """Requests at the engine: `requests`, `aborts`, the `last` body."""
    with urllib.request.urlopen(f"{ENGINE}/seen", timeout=5) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


def aborted(before: int, within: float = 3.0) -> None:
    """Wait until the engine has lost a further caller."""
    ends = time.monotonic() + within
    while seen()["aborts"] <= before:
        expect(time.monotonic() < ends, f"the engine still generates {within:g} s after the client left")
        time.sleep(0.02)


def main(*packages: str) -> None:
    """Run the checks named on the command line, or all, in the same event loop. Prints the packages' versions first."""
    print(json.dumps({"versions": {name: version(name) for name in packages}}), flush=True)
    with asyncio.Runner() as runner:
        for name in sys.argv[1:] or list(_checks):
            if name in _checks:
                print(json.dumps({"check": name, **_result(name, runner)}), flush=True)


def _result(name: str, runner: asyncio.Runner) -> dict[str, Any]:
    reason = next((LEFT_OUT[ending] for ending in LEFT_OUT if name.endswith(ending)), None)
    return {"left_out": reason} if reason else _run(_checks[name], runner)


def _run(function: Callable[[], Any], runner: asyncio.Runner) -> dict[str, Any]:
    try:
        returned = function()
        if inspect.isawaitable(returned):
            runner.run(_bounded(returned))
    except Exception as error:
        lines = traceback.extract_tb(error.__traceback__)
        own = [frame.lineno for frame in lines if frame.filename == function.__code__.co_filename]
        return {"passed": False, "reason": f"{type(error).__name__}: {error}"[:900], "line": own[-1] if own else 0}
    return {"passed": True}


async def _bounded(awaitable: Any) -> None:
    await asyncio.wait_for(awaitable, WITHIN)
