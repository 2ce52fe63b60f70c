"""`firsttoken autoscale`: how many engines the traffic of a running gateway takes, for KEDA over gRPC."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress

from gateway.config.config_errors import ConfigError, did_you_mean
from gateway.config.field_types import ListenAddress, listen_address
from gateway.config.loading import load
from gateway.config.models import Config
from gateway.part_list import CONFIG
from lab.autoscale.autoscaler import Autoscaler, PoolBounds
from policies.routes.route import seconds

MAX_ENGINES = 256  # of a pool
START_TIME = "2m"
_POOL = re.compile(r"(?P<name>[^=]+)=(?P<least>\d{1,4})\.\.(?P<most>\d{1,4})(@(?P<start>[^@]+))?")


def autoscale(args: argparse.Namespace) -> int:
    """Returns exit code 0 at a signal; raises ConfigError for a wrong configuration or argument."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    def configuration() -> Config:
        return load(args.files, os.environ, CONFIG)

    pools, listen = dict(map(pool_bounds, args.pools)), address_of(args.listen)
    check_pools(pools, configuration())
    scaler = Autoscaler(args.admin, pools, configuration, on_answer=lambda line: print(line, flush=True))
    asyncio.run(_serve(scaler, listen))
    return 0


def address_of(text: str) -> ListenAddress:
    """`127.0.0.1:9003`. Raises ConfigError."""
    try:
        return listen_address(text)
    except ValueError as error:
        raise ConfigError([f"--listen: {error}"]) from None


def pool_bounds(text: str) -> tuple[str, PoolBounds]:
    """`llama=2..12@100s`. Raises ConfigError."""
    found = _POOL.fullmatch(text)
    if found is None:
        raise ConfigError([f"--pool {text}: write NAME=MIN..MAX or NAME=MIN..MAX@START_TIME, such as llama=2..12@100s"])
    least, most = int(found["least"]), int(found["most"])
    if not 1 <= least <= most <= MAX_ENGINES:
        raise ConfigError([f"--pool {text}: engines are from 1 to {MAX_ENGINES}, the smaller number first"])
    try:
        start = seconds(found["start"] or START_TIME)
    except ValueError as error:
        raise ConfigError([f"--pool {text}: {error}"]) from None
    return found["name"], PoolBounds(least, most, start)


def check_pools(pools: Mapping[str, PoolBounds], config: Config) -> None:
    """Raises ConfigError."""
    for name in pools:
        if name not in config.pools:
            raise ConfigError([f"--pool {name}: the configuration has no such pool{did_you_mean(name, config.pools)}"])
        if not config.pools[name].kind.local:
            backend = config.pools[name].backend
            raise ConfigError([f"--pool {name}: {backend} is an API, whose servers nobody here can add"])


async def _serve(scaler: Autoscaler, listen: ListenAddress) -> None:
    from gateway.downstream.limits import Intake
    from gateway.parts.picker.grpc_port import GrpcServer
    from lab.autoscale.external_scaler import ExternalScaler

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stop.set)
    calls = GrpcServer(ExternalScaler(scaler.desired).serve, Intake())
    server = await loop.create_server(calls, listen.host, listen.port)
    logging.getLogger("firsttoken").info("autoscale: KEDA's external scaler on %s", listen)
    running = asyncio.create_task(scaler.run())
    await asyncio.wait([running, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    server.close()
    await calls.shutdown(1.0)
    with suppress(asyncio.CancelledError):
        await running
