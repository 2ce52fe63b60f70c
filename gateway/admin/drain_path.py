"""POST /endpoints/drain of the admin port: takes an endpoint out for its maintenance, or has it ready again.

Rules:
- The body is {"endpoint": ID, "state": "drain" or "ready"}, in HAProxy's words. The reply has the endpoint's state and
  its attempts in flight, and names the workers that follow later.
- Every change has a line in the log: of which endpoint, from which address.
- The state is of the process: a reload keeps it, a restart of the gateway does not. Replicas are asked one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Collection, Mapping, Sequence, Set
from typing import Any, Protocol

from aiohttp import web

from gateway.admin.admin_replies import json_response, read_body
from gateway.api.api_error import ApiError, bad_request
from gateway.config.config_errors import nearest, sentence
from gateway.downstream.http_request import caller_address
from gateway.strict_json import BadJson, decode, encode

log = logging.getLogger("firsttoken")

PATH = "/endpoints/drain"
MAX_BODY = 4096  # bytes
DRAIN, READY = "drain", "ready"


class DrainedFleet(Protocol):
    """Endpoints of one gateway, or of several workers."""

    @property
    def drained(self) -> Set[str]:
        """Endpoints that are taken out, by id."""

    def drain(self, endpoints: Set[str]) -> Awaitable[Sequence[str]]:
        """Takes these endpoints out, and no others. Ends when nothing new goes there; returns the names of workers that
        follow later."""

    def fleet(self) -> Awaitable[Sequence[Mapping[str, Any]]]:
        """An entry per endpoint: health, load, learned statistics."""


class DrainPath:
    def __init__(self, data: DrainedFleet) -> None:
        self._data = data

    def routes(self) -> list[web.RouteDef]:
        return [web.post(PATH, self.drain)]

    async def drain(self, http: web.Request) -> web.StreamResponse:
        data = self._data
        endpoint, state = wanted_in(await read_body(http, MAX_BODY))
        known = [each["endpoint"]["id"] for each in await data.fleet()]
        if endpoint not in data.drained and endpoint not in known:
            raise unknown(endpoint, known)
        before, one = data.drained, {endpoint}
        after = before | one if state == DRAIN else before - one
        without = await data.drain(after)
        entry = next((each for each in await data.fleet() if each["endpoint"]["id"] == endpoint), None)
        load: Mapping[str, Any] = {} if entry is None else entry["load"]
        if after != before:
            _log_change(endpoint, state, load.get("in_flight", 0), caller_address(http.transport))
        answer = {
            "result": "unchanged" if after == before else "applied",
            "endpoint": endpoint,
            "state": load.get("health", "absent"),
            "in_flight": load.get("in_flight", 0),
        }
        return json_response(200, encode(answer | ({"not_applied_by": without} if without else {})))


def wanted_in(body: bytes) -> tuple[str, str]:
    """Id of an endpoint, and the wanted state. Raises ApiError."""
    try:
        wanted: Any = decode(body)
    except BadJson as error:
        raise bad_request(f"The body is not valid JSON: {error}.") from None
    if not isinstance(wanted, dict) or not isinstance(wanted.get("endpoint"), str):
        raise bad_request("The body must be a JSON object with endpoint and state.", param="endpoint")
    if wanted.get("state") not in (DRAIN, READY):
        raise bad_request(f"state must be {DRAIN} or {READY}.", param="state")
    return wanted["endpoint"], wanted["state"]


def unknown(endpoint: str, known: Collection[str]) -> ApiError:
    told = sentence(f"There is no endpoint '{endpoint}'{nearest(endpoint, known)}")
    return ApiError(404, told, param="endpoint", code="unknown_endpoint")


def _log_change(endpoint: str, state: str, in_flight: int, address: str) -> None:
    if state == DRAIN:
        told = "endpoint %s is drained from %s: it gets no new request, and has %d in flight"
        log.warning(told, endpoint, address, in_flight)
    else:
        log.warning("endpoint %s is ready again, from %s", endpoint, address)
