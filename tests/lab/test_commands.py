"""Commands of the lab: arguments, and the entry point by which `firsttoken` finds the commands."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import tomllib
from asyncio.subprocess import DEVNULL, PIPE
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from gateway.cli.main import PLUGINS, main
from lab.commands import add_commands
from tests.gateway.cli.test_main import KNOWN, WITH_VALUE
from tests.support.builders import CHAT, calling, post
from tests.support.served import SERVING, write_config
from tests.support.simulated import engines

ROOT = Path(__file__).parents[2]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments, [add_commands])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_package_declares_the_commands_as_an_entry_point() -> None:
    """`firsttoken` has them wherever the wheel is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    [(name, value)] = project["entry-points"][PLUGINS].items()
    assert EntryPoint(name, value, PLUGINS).load() is add_commands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["fly"],
            f"no command 'fly'; known: {KNOWN}, replay, capacity, autoscale, demo, simulate (see firsttoken --help)",
        ),
        (["dem"], "no command 'dem'; did you mean 'demo'? (see firsttoken --help)"),
        (
            ["simulate", "--port", "1"],
            "the following arguments are required: --profile (see firsttoken simulate --help)",
        ),
        (
            ["demo", "--port", "70000"],
            "argument --port: '70000' is not a port, 0 to 65535 (see firsttoken demo --help)",
        ),
        (["demo", "--seconds", "-1"], "argument --seconds: '-1' is not a number above 0 (see firsttoken demo --help)"),
        (["simulate", "--port", "0", "--profile", "8b-h1000"], "no profile '8b-h1000'; did you mean '8b-h100'?"),
    ],
)
def test_wrong_arguments_are_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """A single line that points to `--help`."""
    assert run(capsys, *arguments) == (2, "", f"firsttoken: {message}\n")


@pytest.mark.parametrize("command", ["replay", "capacity", "demo", "simulate"])
def test_help_shows_the_default_of_every_option(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Of each that takes a value, or that it is required; and the help of all names the command."""
    assert f"\n    {command} " in run(capsys, "--help")[1]
    code, out, _ = run(capsys, command, "--help")
    found = WITH_VALUE.findall(out.partition("options:")[2])
    assert (code, "SUPPRESS" in out) == (0, False)
    assert [option for option, text in found if "default" not in text and "(required)" not in text] == []


def test_naming_the_commands_imports_no_engine() -> None:
    """The help answers at once: modules of a command are imported when the command runs."""
    heavy = "{'aiohttp', 'pydantic', 'yaml', 'tiktoken', 'rich', 'lab.engines', 'lab.replay'} & set(sys.modules)"
    code = f"import sys, gateway.cli.main, lab.commands; print({heavy} or 'none')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "none\n"


IMPORTED = re.compile(r"import time:.*\| +(\S+)$", re.MULTILINE)


async def test_a_gateway_that_serves_imports_no_lab(tmp_path: Path) -> None:
    """From the start of the process to its end, with an answer in between."""
    async with engines() as [engine]:
        config = write_config(tmp_path / "f.yaml", engine.url, "simulated")
        command = (sys.executable, "-X", "importtime", "-m", "gateway.cli", "serve", "--config", str(config))
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=DEVNULL, stderr=PIPE)
        assert process.stderr is not None
        try:
            lines = []
            async with asyncio.timeout(60):
                while not (serving := SERVING.match(line := (await process.stderr.readline()).decode())):
                    assert line, "".join(lines)
                    lines.append(line)
                async with calling(serving["url"]) as caller:
                    status, _ = await caller.ask(post({**CHAT, "stream": True, "max_tokens": 2}))
                    assert (status, bool(await caller.chunks())) == (200, True)
                process.terminate()
                lines.append((await process.stderr.read()).decode())
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    modules = set(IMPORTED.findall("".join(lines)))
    assert {"gateway.proxy", "policies.routing.decide", "backends.catalog"} <= modules
    assert [name for name in modules if name.partition(".")[0] == "lab"] == []


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_simulate_serves_until_a_stop_signal(stop: signal.Signals) -> None:
    """The first line names the URL; exit code 0."""
    command = [
        sys.executable,
        "-m",
        "lab",
        "simulate",
        "--profile",
        "8b-h100",
        "--port",
        "0",
        "--model",
        "m",
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first_line = process.stderr.readline()
        process.send_signal(stop)
        assert (process.wait(10), process.stderr.read()) == (0, "")
    assert first_line.startswith("firsttoken: 8b-h100 serves m at http://127.0.0.1:")


def test_simulate_names_the_port_it_cannot_bind(capsys: pytest.CaptureFixture[str]) -> None:
    """192.0.2.1 (RFC 5737) is never assigned to a host."""
    arguments = ("simulate", "--profile", "8b-h100", "--host", "192.0.2.1", "--port", "8000")
    message = "firsttoken: cannot listen on 192.0.2.1:8000: Cannot assign requested address\n"
    assert run(capsys, *arguments) == (2, "", message)
