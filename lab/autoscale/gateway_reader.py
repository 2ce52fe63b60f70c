"""Reads a running gateway over its admin port: requests that have ended, endpoints, and what it has learned of them.

Rules:
- Recent Records are asked for every few seconds, and sooner where an answer is full. A full answer that does not reach
  back to the one before has lost some: the window of demand begins behind them.
- A gateway that does not answer, or answers nonsense, leaves what is known; the log says so once.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any

import msgspec

from gateway.cli.gateway_client import Gone, ask
from gateway.observe.recorder import RECENT
from lab.autoscale.demand import DemandWindow
from policies.latency.learned_state import LearnedEndpoint
from policies.types import Endpoint

log = logging.getLogger("firsttoken")

OFTEN, SELDOM = 1.0, 5.0  # s between two reads of Records
PATIENCE = 10.0  # s
BAD = (KeyError, TypeError, ValueError, AttributeError, IndexError)  # of an answer that is none of a gateway's


@dataclass(frozen=True, slots=True)
class FleetState:
    """`endpoints`: by pool; `learned`: by endpoint; `processes`: gateways that share the traffic."""

    endpoints: Mapping[str, Sequence[Endpoint]] = field(default_factory=dict)
    learned: Mapping[str, LearnedEndpoint] = field(default_factory=dict)
    processes: int = 1


class GatewayReader:
    """`admin`: URL of the admin port. Its methods wait for the network: they run in a thread."""

    def __init__(self, admin: str, demand: DemandWindow) -> None:
        self._admin = admin
        self._demand = demand
        self._seen: set[str] = set()  # ids of the latest answer
        self._has_read = False
        self.pause = OFTEN

    def fetch(self) -> Sequence[Mapping[str, Any]]:
        """Raises Gone."""
        found = ask(self._admin, f"/requests?last={RECENT}", patience=PATIENCE)
        if not isinstance(found, list):
            raise Gone("it says something else")
        return found

    def take(self, records: Sequence[Mapping[str, Any]]) -> int:
        """Adds the new ones to the demand; returns how many there were."""
        before, self._seen = self._seen, {str(each.get("request_id")) for each in records}
        new = [each for each in records if each.get("request_id") not in before]
        if not self._has_read or (len(new) == len(records) >= RECENT):
            self._begin(new)
        self._has_read = True
        for each in new:
            try:
                self._demand.add(each)
            except BAD as error:
                log.debug("autoscale: a record is left out: %s", type(error).__name__)
        self.pause = OFTEN if len(new) > RECENT // 4 else SELDOM
        return len(new)

    def _begin(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Requests before these are not known."""
        walls = [wall for each in records if isinstance(wall := each.get("wall"), float)]
        self._demand.begin(min(walls, default=time()))
        if self._has_read:
            log.warning("autoscale: more than %d requests ended within %g s; some were not read", RECENT, self.pause)

    def fleet(self) -> FleetState:
        """Raises Gone."""
        rows, learned = self._ask("/fleet"), self._ask("/learned")
        processes = self._ask("/routes")
        try:
            endpoints = defaultdict[str, list[Endpoint]](list)
            for row in rows:
                endpoint = row["endpoint"]
                endpoints[endpoint["pool"]].append(Endpoint(endpoint["id"], endpoint["pool"], endpoint["region"]))
            return FleetState(
                endpoints,
                msgspec.convert(learned, dict[str, LearnedEndpoint]),
                max(int(processes["gateway"].get("replicas", 1)), 1),
            )
        except BAD as error:
            raise Gone(f"{type(error).__name__}: {error}") from None

    def _ask(self, path: str) -> Any:
        return ask(self._admin, path, patience=PATIENCE)
