"""The real Envoy, with the configuration of deploy/envoy, before a picker and engines of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import yaml

from benchmarks.processes import free_port
from scripts.envoy_setup import binary

DEPLOYED = Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"


def deployed() -> dict[str, Any]:
    """The configuration of deploy/envoy."""
    config: dict[str, Any] = yaml.safe_load(DEPLOYED.read_text())
    return config


def configuration(config: dict[str, Any], pickers: list[str], engines: list[str], *, duplex: bool) -> dict[str, Any]:
    """With addresses of the test. `duplex`: the body mode of the usual gateways."""
    for listener in config["static_resources"]["listeners"]:
        listener["address"] = address("127.0.0.1", 0)
    callers = config["static_resources"]["listeners"][0]
    manager = callers["filter_chains"][0]["filters"][0]["typed_config"]
    if duplex:
        mode = manager["http_filters"][0]["typed_config"]["processing_mode"]
        mode |= {"request_body_mode": "FULL_DUPLEX_STREAMED", "response_body_mode": "FULL_DUPLEX_STREAMED"}
        mode |= {"request_trailer_mode": "SEND", "response_trailer_mode": "SEND"}
    admin = f"http://127.0.0.1:{free_port()}"
    urls_of = {"picker": pickers, "engines": engines, "admin": [admin]}
    for cluster in config["static_resources"]["clusters"]:
        urls = urls_of[cluster["name"]]
        found = [urlsplit(url) for url in urls]
        ends = [{"endpoint": {"address": address(url.hostname or "", url.port or 0)}} for url in found]
        cluster.pop("cluster_type", None)
        cluster["type"] = "STATIC"
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": ends}]
    config["admin"] = {"address": address("127.0.0.1", urlsplit(admin).port or 0)}
    return config


def address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


@asynccontextmanager
async def envoy(
    folder: Path, version: str, picker: str | list[str], engines: list[str], *, duplex: bool = False
) -> AsyncIterator[str]:
    """The one of deploy/envoy: base URL of the callers' port."""
    pickers = [picker] if isinstance(picker, str) else picker
    async with running_envoy(folder, version, configuration(deployed(), pickers, engines, duplex=duplex)) as url:
        yield url


@asynccontextmanager
async def running_envoy(folder: Path, version: str, config: dict[str, Any]) -> AsyncIterator[str]:
    """Base URL of the callers' port."""
    async with envoy_of(folder, version, config) as running:
        yield running.urls["callers"]


@dataclass
class Envoy:
    """`urls`: of the listeners, by name. `admin`: of the admin port."""

    process: asyncio.subprocess.Process
    urls: dict[str, str]
    admin: str


@asynccontextmanager
async def envoy_of(folder: Path, version: str, config: dict[str, Any]) -> AsyncIterator[Envoy]:
    """Killed where it does not end: no test leaves it behind."""
    written, admin = folder / "envoy.yaml", folder / "admin"
    written.write_text(yaml.safe_dump(config))
    command = [str(binary(version)), "-c", str(written), "--admin-address-path", str(admin), "--concurrency", "1"]
    options = ["--disable-hot-restart", "--log-level", "warning", "--log-path", str(folder / "envoy.log")]
    process = await asyncio.create_subprocess_exec(*command, *options)
    try:
        urls = await listening(admin, {each["name"] for each in config["static_resources"]["listeners"]})
        yield Envoy(process, urls, f"http://{written_text(admin)}")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def listening(admin: Path, names: set[str]) -> dict[str, str]:
    """Base URLs of the listeners, by name, once all listen."""
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        while not (told := written_text(admin)):  # noqa: ASYNC110 - written by another process
            await asyncio.sleep(0.05)
        while not await is_ready(session, told):  # noqa: ASYNC110 - takes connections once its clusters are known
            await asyncio.sleep(0.05)
        while True:
            async with session.get(f"http://{told}/listeners?format=json") as reply:
                statuses = (await reply.json()).get("listener_statuses", ())
            found = {each["name"]: each["local_address"]["socket_address"] for each in statuses}
            if found.keys() == names:
                return {name: f"http://{at['address']}:{at['port_value']}" for name, at in found.items()}
            await asyncio.sleep(0.05)


def written_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def is_ready(session: aiohttp.ClientSession, admin: str) -> bool:
    async with session.get(f"http://{admin}/ready") as reply:
        return reply.status == 200
