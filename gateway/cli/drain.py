"""`firsttoken drain`: takes an endpoint out, waits until no request is left there, and has it ready again.

Ctrl-C ends the wait alone. A gateway that has the endpoint ready again meanwhile, or that restarts, ends it with an
error: whoever waits to stop the engine must not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from time import sleep
from typing import Any

from gateway.cli.gateway_client import ask_admin
from gateway.config.config_errors import ConfigError

LOOK = 0.5  # s between two looks
EMPTY = 2  # looks in a row without a request: workers and replicas tell each other theirs within 0.1 s
INTERRUPTED = 130  # exit code, as shells have it


def drain(args: argparse.Namespace) -> int:
    """`args`: endpoint, ready, admin. Raises ConfigError."""
    state = "ready" if args.ready else "drain"
    answer = _set_state(args.admin, args.endpoint, state)
    for worker in answer.get("not_applied_by", ()):
        print(f"{worker} of the gateway stands still, and follows when it goes on", flush=True)
    if args.ready:
        print(f"{args.endpoint} is ready again ({answer['state']})")
        return 0
    print(f"{args.endpoint} gets no new request", flush=True)
    try:
        _wait_until_empty(args.admin, args.endpoint)
    except KeyboardInterrupt:
        print(f"\nnot waited for: {args.endpoint} stays drained; firsttoken drain --ready {args.endpoint} ends that")
        return INTERRUPTED
    print(f"{args.endpoint} is empty")
    return 0


def _set_state(admin: str, endpoint: str, state: str) -> Mapping[str, Any]:
    body = json.dumps({"endpoint": endpoint, "state": state}).encode()
    answer: Mapping[str, Any] = ask_admin(admin, "/endpoints/drain", body, {"content-type": "application/json"})
    return answer


def _wait_until_empty(admin: str, endpoint: str) -> None:
    """Prints a line for each change. Raises ConfigError, KeyboardInterrupt."""
    told, looks = 0, 0
    while looks < EMPTY:
        left = _in_flight(admin, endpoint)
        looks = 0 if left else looks + 1
        if left and left != told:
            print(f"{left} {'request' if left == 1 else 'requests'} in progress", flush=True)
        told = left
        sleep(LOOK)


def _in_flight(admin: str, endpoint: str) -> int:
    """Raises ConfigError where the endpoint is not drained any more."""
    fleet = ask_admin(admin, "/fleet")
    entry = next((each for each in fleet if each["endpoint"]["id"] == endpoint), None)
    if entry is None:
        raise ConfigError([f"{admin}: {endpoint} has left the configuration: how many requests it has is not known"])
    if entry["load"]["health"] != "draining":
        told = "somebody has it ready again, or the gateway was restarted"
        raise ConfigError([f"{admin}: {endpoint} is {entry['load']['health']}, and drained no longer: {told}"])
    return int(entry["load"]["in_flight"])
