"""The built wheel in a fresh environment, run from a folder whose own modules have the names of the wheel's.

`make wheel` runs this: it needs a package index for the build backend and the dependencies.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from gateway.cli.arguments import EXPORTS

ROOT = Path(__file__).parents[3]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
PACKAGES = ("backends", "firsttoken", "gateway", "lab", "policies")
FORK = {"GITHUB_SERVER_URL": "https://git.example", "GITHUB_REPOSITORY": "us/gateway"}
KEYS = ("_API_KEY", "_BASE_URL")
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
TIMEOUT = 600.0  # s, of one command: an installation downloads, and a busy machine takes minutes to unpack


def finish(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Standard output of a command that succeeds."""
    done = subprocess.run(
        command, cwd=cwd, env=clean() | env, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def clean() -> dict[str, str]:
    """Environment without keys, and without modules but the installed ones."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.endswith(KEYS)}


@dataclass(frozen=True)
class Installed:
    """A fresh environment with the wheel. `cwd`: a folder with hostile modules."""

    wheel: Path
    venv: Path
    cwd: Path

    @property
    def python(self) -> Path:
        return self.venv / "bin/python"

    def commands(self) -> dict[str, tuple[str | Path, ...]]:
        return {"module": (self.python, "-m", "firsttoken"), "script": (self.venv / "bin/firsttoken",)}

    @asynccontextmanager
    async def running(self, *arguments: str) -> AsyncIterator[Process]:
        """A command, interrupted at the end, which then has to succeed."""
        process = await asyncio.create_subprocess_exec(
            *(self.python, "-m", "firsttoken", *arguments), cwd=self.cwd, env=clean(), stdout=PIPE, stderr=PIPE
        )
        try:
            yield process
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 30) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    finish(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, **FORK)
    (wheel,) = folder.glob("*.whl")
    finish(sys.executable, "-m", "venv", folder / "venv")
    finish(folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--prefer-binary", wheel)
    for name in set(PACKAGES) - {"firsttoken"}:
        (folder / "cwd" / name).mkdir(parents=True)
        (folder / "cwd" / name / "__init__.py").write_text("raise RuntimeError('a module of the user')\n")
    return Installed(wheel, folder / "venv", folder / "cwd")


@pytest.fixture(params=["module", "script"])
def command(request: pytest.FixtureRequest, installed: Installed) -> tuple[str | Path, ...]:
    return installed.commands()[request.param]


def test_the_wheel_is_pure_and_holds_every_package(installed: Installed) -> None:
    """Each with its typed marker, and the files of facts; no tests, no benchmarks."""
    assert installed.wheel.name == f"firsttoken-{VERSION}-py3-none-any.whl"
    with ZipFile(installed.wheel) as wheel:
        names = wheel.namelist()
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, f"firsttoken-{VERSION}.dist-info"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert {"backends/facts/models.yaml", "backends/facts/apis.yaml"} <= set(names)


def test_the_metadata_name_the_repository_of_the_build(installed: Installed) -> None:
    """And what an index shows."""
    with ZipFile(installed.wheel) as wheel:
        text = wheel.read(f"firsttoken-{VERSION}.dist-info/METADATA").decode()
    metadata = Parser().parsestr(text)
    assert "Repository, https://git.example/us/gateway" in (metadata.get_all("Project-URL") or [])
    assert "Typing :: Typed" in (metadata.get_all("Classifier") or [])
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_commands_run_beside_modules_of_the_same_names(
    command: tuple[str | Path, ...], installed: Installed
) -> None:
    """`python -m firsttoken` and the script, in a folder with a `gateway` and a `lab` of the user's."""
    assert finish(*command, "--version", cwd=installed.cwd) == f"firsttoken {VERSION}\n"
    assert "\n    demo " in finish(*command, "--help", cwd=installed.cwd)
    assert "routes" in json.loads(finish(*command, "schema", cwd=installed.cwd))["properties"]


@pytest.mark.parametrize("kind", EXPORTS)
def test_the_files_of_each_kind_are_exported(kind: str, installed: Installed, tmp_path: Path) -> None:
    """The same as in the repository."""
    finish(installed.python, "-m", "firsttoken", "export", kind, tmp_path / "out", cwd=installed.cwd)
    expected = {path.name: path.read_bytes() for path in ROOT.glob(EXPORTS[kind])}
    assert expected
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == expected


def test_type_checkers_see_the_types_of_the_package(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text("from gateway.serve import serving_line\nx: int = serving_line('', '')\n")
    mypy = (sys.executable, "-m", "mypy", "--python-executable", str(installed.python), "user.py")
    done = subprocess.run(mypy, cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert re.search(r'has type "str", variable has type "int"', done.stdout), done.stdout


@pytest.mark.parametrize("runner", ["uvx", "pipx"])
def test_a_runner_needs_nothing_but_the_wheel(runner: str, installed: Installed, tmp_path: Path) -> None:
    """uvx, and pipx run."""
    tools = tmp_path / "tools"
    finish(sys.executable, "-m", "venv", tools)
    finish(tools / "bin/python", "-m", "pip", "install", "--quiet", "uv" if runner == "uvx" else "pipx")
    wheel = str(installed.wheel)
    runners = {"uvx": ("bin/uvx", "--from", wheel), "pipx": ("bin/pipx", "run", "--spec", wheel)}
    first, *rest = runners[runner]
    homes = {name: str(tmp_path / name) for name in ("PIPX_HOME", "UV_CACHE_DIR", "UV_TOOL_DIR")}
    version = finish(tools / first, *rest, "firsttoken", "--version", cwd=installed.cwd, **homes)
    assert version == f"firsttoken {VERSION}\n"


async def test_the_demo_answers(installed: Installed) -> None:
    """Engines and callers are processes of their own, which import what the gateway imports."""
    async with installed.running("demo", "--port", "0", "--admin-port", "0") as demo:
        assert demo.stdout is not None
        url = await found(demo.stdout, rb"base_url\s+(http://\S+)/v1")
        answer = await asyncio.to_thread(ask, url, CHAT)
        answered = await found(demo.stdout, rb"(?m)^\s*chat\s+(\d+\.\d)")
    assert answer["choices"][0]["message"]["content"]
    assert float(answered) > 0


async def test_up_finds_and_serves_a_server_of_this_machine(installed: Installed) -> None:
    """An engine of the wheel's own, simulated."""
    async with installed.running("simulate", "--profile", "8b-l4", "--port", "0") as engine:
        assert engine.stderr is not None
        port = await found(engine.stderr, rb"serves .* at http://127.0.0.1:(\d+)/v1")
        async with installed.running("up", "--local", port, "--port", "0", "--admin-port", "0") as up:
            assert up.stderr is not None
            url = await found(up.stderr, rb"(http://127.0.0.1:\d+)/v1")
            models = await asyncio.to_thread(ask, url, None, "/v1/models")
            answer = await asyncio.to_thread(ask, url, {**CHAT, "model": models["data"][0]["id"]})
    assert answer["choices"][0]["message"]["content"]


async def found(output: asyncio.StreamReader, pattern: bytes) -> str:
    """First group of the first match in the lines of an output."""
    seen = b""
    async with asyncio.timeout(TIMEOUT):
        while not (match := re.search(pattern, seen)):
            line = await output.readline()
            assert line, seen.decode()
            seen += line
    return match[1].decode()


def ask(url: str, body: object, path: str = "/v1/chat/completions") -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        answer: dict[str, object] = json.load(reply)
    return answer
