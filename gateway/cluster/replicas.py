"""Replicas of the gateway on other machines: what each has under way and has sent where, over Redis Pub/Sub.

Rules:
- No request waits: what is published is kept until the next message, and `merge` takes in what has arrived.
- One task tells: TELL seconds after something changed, or each second in full (gateway.cluster.pending_updates).
  While Redis is
  away it keeps still. A message that was not taken is followed by a full one.
- One task hears, on a connection of its own. It hears itself too: when it does not for SILENT seconds, though it could
  tell, it connects anew.
- Without Redis each replica is alone: what the others told ends after SILENT seconds (gateway.cluster.peer_view).
- The log has a line where Redis does not let us, and one when it does again; that Redis is away is the link's to say.

Pub/Sub and not a stream: old news is worth nothing, and nobody has to keep it, trim it, or give us a key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from gateway.cluster.peer_view import SILENT, Peers
from gateway.cluster.pending_updates import EVERY_FULL, TELL, PendingUpdates
from gateway.cluster.redis_client import RedisClient, Unavailable, said
from policies.fleet.peers import PeerLoad, PeerReader

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("firsttoken")

PATIENCE = 0.25  # s that one has to be taken
PAUSE = 0.5  # s between two attempts to listen
REFUSED = 5.0  # s before we ask again for what Redis does not let us do
CHANNEL = "{namespace}:replicas:1"  # 1: the form of the messages


class Replicas:
    """Implements `policies.fleet.peers.Siblings`. `group`: of all processes that know of each other without Redis;
    `knows`: whether an endpoint is ours."""

    def __init__(self, link: RedisClient, namespace: str, group: bytes, knows: Callable[[str], bool]) -> None:
        self.link, self.channel = link, CHANNEL.format(namespace=namespace)
        self.outbox, self.peers = PendingUpdates(group), Peers(group, knows)
        self.heard_at = 0.0  # anything at all: we hear ourselves too
        self._told_at = 0.0  # that Redis took a message
        self._news = asyncio.Event()
        self._refusals: dict[str, str] = {}  # what we may not do, and why
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False  # before 3.12, `wait_for` in redis-py may lose a cancellation (python/cpython#86296)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._tell_forever()), loop.create_task(self._hear_forever())]

    async def close(self) -> None:
        """Nobody waits for our silence to see that we are gone."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        with suppress(Unavailable):
            await self._publish(self.outbox.farewell(monotonic()))

    def count(self) -> int:
        """Gateways that are heard of now, this one included."""
        return self.peers.replicas(monotonic())

    # -- siblings ---------------------------------------------------------------------------

    def publish(self, endpoint_id: str, burden: PeerLoad) -> None:
        self.outbox.publish(endpoint_id, burden)
        self._news.set()

    def sent(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        self.outbox.sent(endpoint_id, hashes)
        self._news.set()

    def merge(self, reader: PeerReader, now: float) -> None:
        self.peers.merge(reader, now)

    # -- telling ----------------------------------------------------------------------------

    async def _tell_forever(self) -> None:
        while not self._closed:
            if not self.link.up:
                self.outbox.forget()
                await asyncio.sleep(PAUSE / 2)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_FULL):
                    await self._news.wait()
                await asyncio.sleep(TELL)
            self._news.clear()
            if (message := self.outbox.message(monotonic())) is not None:
                await self._tell(message)

    async def _tell(self, message: bytes) -> None:
        try:
            refusal = await self._publish(message)
        except Unavailable:
            self.outbox.forget()
            return
        if refusal is None:
            self._told_at = monotonic()
        self._note("publish to", refusal)
        if refusal is not None:
            self.outbox.forget()
            await asyncio.sleep(REFUSED)

    async def _publish(self, message: bytes) -> Exception | None:
        """Why Redis does not let us; None where it does. Raises Unavailable."""
        from redis.exceptions import ResponseError

        async def ask(redis: Redis) -> Exception | None:
            try:
                await redis.publish(self.channel, message)
            except ResponseError as error:  # it is there, and well
                return error
            return None

        return await self.link.call(ask, PATIENCE)

    # -- hearing ----------------------------------------------------------------------------

    async def _hear_forever(self) -> None:
        from redis.exceptions import ResponseError

        while not self._closed:
            try:
                await self._listen()
            except ResponseError as error:
                self._note("subscribe to", error)
                await asyncio.sleep(REFUSED)
            except Exception as error:  # of redis-py, of TLS, of DNS: the link says that Redis is away
                log.debug("replicas: %s", said(error, self.link.address))
            await asyncio.sleep(PAUSE)

    async def _listen(self) -> None:
        """Until the connection ends, or is silent where we should hear ourselves."""
        subscription: Any = self.link.client.pubsub(ignore_subscribe_messages=True)
        try:
            await subscription.subscribe(self.channel)
            self.heard_at = monotonic()
            while not (self._closed or self._is_deaf()):
                message = await subscription.get_message(timeout=SILENT / 2)
                if message is not None and message["type"] == "message":
                    self._note("subscribe to", None)
                    self.heard_at = now = monotonic()
                    self.peers.hear(message["data"], now)
        finally:
            with suppress(Exception):
                await subscription.aclose()

    def _is_deaf(self) -> bool:
        """Redis took what we told, and we do not hear it."""
        return self._told_at - self.heard_at > SILENT

    # -- what the operator is told ----------------------------------------------------------

    def _note(self, what: str, refusal: Exception | None) -> None:
        """One line per change."""
        known = self._refusals.get(what)
        if refusal is None and known is not None:
            del self._refusals[what]
            log.info("replicas: we may %s the channel %s again", what, self.channel)
        elif refusal is not None and known is None:
            self._refusals[what] = said(refusal, self.link.address)
            log.error(
                "replicas: Redis does not let us %s the channel %s: %s; this gateway is alone",
                what,
                self.channel,
                self._refusals[what],
            )
