"""`firsttoken simulate`: serves one simulated engine, or API, with the real protocol until a signal."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys

from backends.server_profiles import PROFILES
from gateway.config.config_errors import ConfigError, did_you_mean
from gateway.config.field_types import ListenAddress
from gateway.process import loop_factory
from gateway.tokenize.tokenizers import encoder
from lab.servers.simulated_server import SimulatedServer


def simulate(args: argparse.Namespace) -> int:
    """`args`: profile, host, port (0: any free port), model (None: the profile's name), speed."""
    if args.profile not in PROFILES:
        raise ConfigError([f"firsttoken: no profile '{args.profile}'{did_you_mean(args.profile, PROFILES)}"])
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_simulate(args))


async def _simulate(args: argparse.Namespace) -> int:
    server = SimulatedServer(
        PROFILES[args.profile],
        model=args.model or args.profile,
        encode=encoder("o200k_base").encode,
        host=args.host,
        port=args.port,
        speed=args.speed,
    )
    stopped = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    try:
        await server.start()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise ConfigError([f"firsttoken: cannot listen on {ListenAddress(args.host, args.port)}: {why}"]) from None
    where = ListenAddress(server.host, server.port)
    print(f"firsttoken: {server.profile.name} serves {server.model} at http://{where}/v1", file=sys.stderr, flush=True)
    await stopped.wait()
    await server.stop()
    return 0
