"""A real Prometheus which scrapes the test's target, with the rules and the scrape configuration of deploy/."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import yaml

from benchmarks.processes import free_port
from scripts import prometheus_setup

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
FILES = DEPLOY.parent / "helm" / "firsttoken" / "files"  # docker-compose.yml mounts its `rules` beside prometheus.yml
EVERY = "1s"  # scrapes and evaluations


def program(name: str) -> Path:
    """Path of `prometheus` or `promtool`. Without the program the test is skipped; with FIRSTTOKEN_NO_SKIP the test
    fails."""
    found = prometheus_setup.found()
    if found is not None:
        return found[name]
    reason = "no Prometheus here: python scripts/prometheus_setup.py fetches Debian's"
    if os.environ.get("FIRSTTOKEN_NO_SKIP"):
        pytest.fail(reason)
    pytest.skip(reason)


def configuration(admin_url: str) -> dict[str, Any]:
    """Scrape configuration of deploy/, with a single target and a short interval."""
    ours: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
    (job,) = [job for job in ours["scrape_configs"] if job["job_name"] == "firsttoken"]
    return {
        **ours,
        "global": {**ours["global"], "scrape_interval": EVERY, "evaluation_interval": EVERY},
        "rule_files": [str(FILES / pattern) for pattern in ours["rule_files"]],
        "scrape_configs": [{**job, "static_configs": [{"targets": [urlsplit(admin_url).netloc]}]}],
    }


class Prometheus:
    """The HTTP API's reply."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def get(self, path: str, **parameters: str) -> Any:
        async with self.session.get(f"{self.url}/api/v1/{path}", params=parameters) as reply:
            body = await reply.json()
        assert body["status"] == "success", body
        return body["data"]

    async def values(self, query: str) -> list[tuple[dict[str, str], float]]:
        """The labels and the value of each series, now."""
        data = await self.get("query", query=query)
        assert data["resultType"] == "vector", data
        return [(found["metric"], float(found["value"][1])) for found in data["result"]]


@asynccontextmanager
async def scraping(admin_url: str, folder: Path) -> AsyncIterator[Prometheus]:
    """Ready to answer. The log is `prometheus.log` in the folder."""
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(configuration(admin_url)), "utf-8")
    address = f"127.0.0.1:{free_port()}"  # Prometheus does not report a port chosen by the system
    log = folder / "prometheus.log"
    with log.open("wb") as log_file:
        process = await asyncio.create_subprocess_exec(
            program("prometheus"),
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            stdout=log_file,
            stderr=log_file,
        )
    try:
        async with aiohttp.ClientSession() as session:
            if not await _ready(f"http://{address}", session, process):
                raise AssertionError(f"Prometheus has ended: {log.read_text('utf-8')}")
            yield Prometheus(f"http://{address}", session)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(url: str, session: aiohttp.ClientSession, process: Process) -> bool:
    """True once the server answers, or has ended."""
    async with asyncio.timeout(60):
        while process.returncode is None:
            try:
                async with session.get(f"{url}/-/ready") as reply:
                    if reply.status == 200:
                        return True
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
    return False
