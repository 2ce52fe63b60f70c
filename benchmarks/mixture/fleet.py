"""A gateway in this process before simulated engines of every temper, over real sockets."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from backends.simulated.faults import Faults
from backends.simulated.profiles import profile_named
from backends.simulated.simulated_server import SimulatedServer
from benchmarks.mixture.requests import KEY
from gateway.app import Gateway
from gateway.config.models import Config
from gateway.tokenize.tokenizers import encoder

WELL = Faults()
TEMPERS: dict[str, tuple[Faults, ...]] = {
    "good": (WELL, WELL),
    "flaky": (Faults(status=500, status_share=0.3), Faults(status=500, status_share=0.2)),
    "stalling": (Faults(stall_share=0.3), Faults(stall_share=0.1)),
    "cut": (Faults(cut_after_tokens=3),),
    "erring": (Faults(error_after_tokens=3),),
    "failing": (Faults(status=500),),
}
PLAIN = {"ttft": {"budget": "20s"}, "tpot": "off", "hedge": "off"}
OF_ITS_OWN: dict[str, dict[str, Any]] = {
    "stalling": {"ttft": {"budget": "500ms"}, "hedge": {"max_extra": "50%"}},
    "impossible": {"tiers": ["good"], "ttft": {"budget": "1ms"}, "on_miss": "shed"},
}


def document(urls: dict[str, list[str]], access_log: str) -> dict[str, Any]:
    pools = {name: {"backend": "simulated", "model": "served", "endpoints": found} for name, found in urls.items()}
    routes = {name: {"tiers": [name], **PLAIN} for name in pools}
    return {
        "server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "pools": pools,
        "routes": {**routes, **{name: {**PLAIN, **routes.get(name, {}), **own} for name, own in OF_ITS_OWN.items()}},
        "defaults": {"first_token": "5s"},
        "keys": [{"name": "mixed", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}],
        "telemetry": {"access_log": access_log},
    }


@asynccontextmanager
async def fleet(access_log: str) -> AsyncIterator[tuple[Gateway, list[SimulatedServer]]]:
    async with AsyncExitStack() as stack:
        urls: dict[str, list[str]] = {}
        servers = []
        for name, tempers in TEMPERS.items():
            for faults in tempers:
                server = SimulatedServer(
                    profile_named("8b-h100"), model="served", encode=encoder("o200k_base").encode, seed=len(servers)
                )
                await server.start()
                stack.push_async_callback(server.stop)
                for fault in Faults.__struct_fields__:
                    setattr(server.faults, fault, getattr(faults, fault))
                urls.setdefault(name, []).append(server.url)
                servers.append(server)
        gateway = Gateway(Config.model_validate(document(urls, access_log)))
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        yield gateway, servers
