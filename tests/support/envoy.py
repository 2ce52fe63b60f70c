"""The real Envoy, with the configuration of deploy/envoy, before a picker and engines of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import yaml

from scripts.envoy_setup import binary

DEPLOYED = Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"


def configuration(picker: str, engines: list[str], *, duplex: bool) -> dict[str, Any]:
    """The deployed one, with addresses of the test. `duplex`: the body mode of the usual gateways."""
    config: dict[str, Any] = yaml.safe_load(DEPLOYED.read_text())
    (listener,) = config["static_resources"]["listeners"]
    listener["address"] = address("127.0.0.1", 0)
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    if duplex:
        mode = manager["http_filters"][0]["typed_config"]["processing_mode"]
        mode |= {"request_body_mode": "FULL_DUPLEX_STREAMED", "response_body_mode": "FULL_DUPLEX_STREAMED"}
        mode |= {"request_trailer_mode": "SEND", "response_trailer_mode": "SEND"}
    picking, serving = config["static_resources"]["clusters"]
    for cluster, urls in ((picking, [picker]), (serving, engines)):
        found = [urlsplit(url) for url in urls]
        ends = [{"endpoint": {"address": address(url.hostname or "", url.port or 0)}} for url in found]
        cluster["type"] = "STATIC"
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": ends}]
    config["admin"] = {"address": address("127.0.0.1", 0)}
    return config


def address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


@asynccontextmanager
async def envoy(
    folder: Path, version: str, picker: str, engines: list[str], *, duplex: bool = False
) -> AsyncIterator[str]:
    """Base URL of the callers' port."""
    written, admin = folder / "envoy.yaml", folder / "admin"
    written.write_text(yaml.safe_dump(configuration(picker, engines, duplex=duplex)))
    command = [str(binary(version)), "-c", str(written), "--admin-address-path", str(admin), "--concurrency", "1"]
    options = ["--disable-hot-restart", "--log-level", "warning", "--log-path", str(folder / "envoy.log")]
    process = await asyncio.create_subprocess_exec(*command, *options)
    try:
        yield await listening(admin)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def listening(admin: Path) -> str:
    """Base URL of the only listener."""
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        while not (told := written_text(admin)):  # noqa: ASYNC110 - written by another process
            await asyncio.sleep(0.05)
        while True:
            async with session.get(f"http://{told}/listeners?format=json") as reply:
                for status in (await reply.json()).get("listener_statuses", ()):
                    found = status["local_address"]["socket_address"]
                    return f"http://{found['address']}:{found['port_value']}"
            await asyncio.sleep(0.05)


def written_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
