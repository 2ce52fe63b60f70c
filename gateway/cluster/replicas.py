"""Exchange of load and prompt updates with replicas on other machines, over Redis Pub/Sub.

Rules:
- No request waits: updates are kept until the next message, and `merge` applies received ones.
- One task sends: SEND_INTERVAL after a change, or each FULL_INTERVAL in full. The task pauses while Redis is
  unavailable, and follows a lost message by a full one.
- One task receives on a separate connection, our messages too. Without those for PEER_TIMEOUT after sending, the task
  reconnects.
- Without Redis each replica is alone: loads of the others end after PEER_TIMEOUT.
- The log has a line when Redis denies the channel, and when Redis allows the channel again. `RedisClient` logs
  outages.

Pub/Sub and not a stream: old updates are worthless, and need no storage, trimming or key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from gateway.cluster.gossip import FULL_INTERVAL, PEER_TIMEOUT, SEND_INTERVAL, Peers, PendingUpdates
from gateway.cluster.redis_client import RedisClient, Unavailable, error_text
from gateway.cluster.redis_names import redis_name
from policies.fleet.peers import PeerLoad, PeerReader

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("firsttoken")

SEND_TIMEOUT = 0.25  # s
RECONNECT_PAUSE = 0.5  # s between two attempts to subscribe
DENIED_PAUSE = 5.0  # s until the next attempt after Redis has denied the channel
CHANNEL = "replicas", "1"  # 1: version of the message format


class Replicas:
    """Implements `policies.fleet.peers.PeerLink`.

    `group`: name of the workers of this gateway; `knows`: True for an endpoint of this gateway.
    """

    def __init__(self, redis: RedisClient, namespace: str, group: bytes, knows: Callable[[str], bool]) -> None:
        self.redis = redis
        self.channel = redis_name(namespace, *CHANNEL)
        self.pending = PendingUpdates(group)
        self.peers = Peers(group, knows)
        self.received_at = 0.0
        self._sent_at = 0.0
        self._changed = asyncio.Event()
        self._denied: set[str] = set()  # operations
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False  # before 3.12, `wait_for` in redis-py may lose a cancellation (python/cpython#86296)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._send_forever()), loop.create_task(self._receive_forever())]

    async def close(self) -> None:
        """Says goodbye, so peers need not wait for the timeout."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        with suppress(Unavailable):
            await self._send(self.pending.farewell(monotonic()))

    def count(self) -> int:
        """Number of live gateways, including this gateway."""
        return self.peers.replicas(monotonic())

    # -- PeerLink ---------------------------------------------------------------------------

    def publish(self, endpoint_id: str, load: PeerLoad) -> None:
        self.pending.publish(endpoint_id, load)
        self._changed.set()

    def publish_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        self.pending.publish_prompt(endpoint_id, hashes)
        self._changed.set()

    def merge(self, reader: PeerReader, now: float) -> None:
        self.peers.merge(reader, now)

    # -- sending ----------------------------------------------------------------------------

    async def _send_forever(self) -> None:
        while not self._closed:
            if not self.redis.up:
                self.pending.forget()
                await asyncio.sleep(RECONNECT_PAUSE / 2)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(FULL_INTERVAL):
                    await self._changed.wait()
                await asyncio.sleep(SEND_INTERVAL)
            self._changed.clear()
            if (message := self.pending.message(monotonic())) is None:
                continue
            try:
                denial = await self._send(message)
            except Unavailable:
                self.pending.forget()
                continue
            self._log_access("publish to", denial)
            if denial is None:
                self._sent_at = monotonic()
            else:
                self.pending.forget()
                await asyncio.sleep(DENIED_PAUSE)

    async def _send(self, message: bytes) -> Exception | None:
        """Returns the error if Redis denies publishing. Raises Unavailable."""
        from redis.exceptions import ResponseError

        async def publish(redis: Redis) -> Exception | None:
            try:
                await redis.publish(self.channel, message)
            except ResponseError as error:  # an answer: Redis is available
                return error
            return None

        return await self.redis.call(publish, SEND_TIMEOUT)

    # -- receiving --------------------------------------------------------------------------

    async def _receive_forever(self) -> None:
        from redis.exceptions import ResponseError

        while not self._closed:
            try:
                await self._receive()
            except ResponseError as error:
                self._log_access("subscribe to", error)
                await asyncio.sleep(DENIED_PAUSE)
            except Exception as error:  # of redis-py, TLS, DNS: the client logs the outage
                log.debug("replicas: %s", error_text(error, self.redis.url))
            await asyncio.sleep(RECONNECT_PAUSE)

    async def _receive(self) -> None:
        """Returns when the connection ends, or does not deliver our own messages."""
        subscription: Any = self.redis.client.pubsub(ignore_subscribe_messages=True)
        try:
            await subscription.subscribe(self.channel)
            self.received_at = monotonic()
            while not self._closed and self._sent_at - self.received_at <= PEER_TIMEOUT:
                message = await subscription.get_message(timeout=PEER_TIMEOUT / 2)
                if message is not None and message["type"] == "message":
                    self._log_access("subscribe to", None)
                    self.received_at = now = monotonic()
                    self.peers.on_message(message["data"], now)
        finally:
            with suppress(Exception):
                await subscription.aclose()

    def _log_access(self, operation: str, denial: Exception | None) -> None:
        if denial is None and operation in self._denied:
            self._denied.remove(operation)
            log.info("replicas: allowed to %s channel %s again", operation, self.channel)
        elif denial is not None and operation not in self._denied:
            self._denied.add(operation)
            reason = error_text(denial, self.redis.url)
            text = "replicas: Redis denies to %s channel %s: %s; this gateway does not share load with replicas"
            log.error(text, operation, self.channel, reason)
