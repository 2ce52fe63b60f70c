"""The systemd unit: valid by systemd's own check, and in agreement with the gateway."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.config.models import Drain

UNIT = Path(__file__).parents[2] / "deploy/systemd/firsttoken.service"
SETTINGS = [line.partition("=") for line in UNIT.read_text("utf-8").splitlines() if "=" in line and line[0] != "#"]


def setting(name: str) -> str:
    (value,) = [value for key, _, value in SETTINGS if key == name]
    return value


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """Checked with a program that exists here; an unknown or wrong setting is a warning."""
    text = UNIT.read_text("utf-8")
    command = setting("ExecStart").split()[0]
    (tmp_path / UNIT.name).write_text(text.replace(command, shutil.which("true") or ""))
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / UNIT.name], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_drain_ends_before_systemd_kills() -> None:
    """By the defaults of `server.drain`, and the 5 s for a worker that hangs."""
    assert float(setting("TimeoutStopSec")) >= Drain().wait + Drain().grace + 5
    assert setting("KillMode") == "mixed"  # the supervisor alone gets SIGTERM


def test_a_wrong_configuration_is_not_tried_again() -> None:
    """Exit code 2 is that of a configuration with errors, and of a port in use."""
    assert (setting("Restart"), setting("RestartPreventExitStatus")) == ("on-failure", "2")
    assert setting("ExecReload").endswith("-HUP $MAINPID")


@pytest.mark.parametrize("path", [UNIT, *(UNIT.parents[2] / "docs").glob("*.md")], ids=lambda path: path.name)
def test_commands_are_those_of_the_oldest_systemd_that_is_supported(path: Path) -> None:
    """`--kill-whom` came with systemd 252; 250 and all later ones know `--kill-who`."""
    assert "--kill-whom" not in path.read_text("utf-8")
