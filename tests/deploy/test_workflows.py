"""Workflows of GitHub Actions, read: they are run there, and never here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["classifiers"]


def read(path: Path) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return workflow


def runs(workflow: dict[str, Any]) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job.get("steps", []) if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_by_the_hash_of_a_commit(path: Path) -> None:
    """A tag can be moved. The comment names the version of the hash; one action has one hash."""
    lines = [line.strip() for line in path.read_text("utf-8").splitlines() if "uses:" in line]
    assert lines
    remote = [line for line in lines if "uses: ./" not in line]
    assert [line for line in remote if not re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []


def test_an_action_has_one_hash() -> None:
    pins = {pin for path in WORKFLOWS for pin in re.findall(r"uses: ([\w/-]+)@(\w+)", path.read_text("utf-8"))}
    assert len({action for action, _ in pins}) == len(pins)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_jobs_may_read_unless_they_say_more(path: Path) -> None:
    """No text of a pull request is part of a command: expressions stay out of `run`."""
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert [command for command in runs(workflow) if "${{" in command] == []


def test_every_supported_python_is_tested() -> None:
    """The same that the classifiers name."""
    matrix = read(ROOT / ".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    supported = [text.rpartition(" ")[2] for text in CLASSIFIERS if re.fullmatch(r".*Python :: 3\.\d+", text)]
    assert matrix == supported


def test_every_named_target_and_file_exists() -> None:
    """Of make, and of the repository."""
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text("utf-8")))
    commands = [line for path in WORKFLOWS for command in runs(read(path)) for line in command.splitlines()]
    assert {line.removeprefix("make ") for line in commands if line.startswith("make ")} <= targets
    assert (ROOT / ".ci/run").is_file()
    assert ".ci/run" in commands
    steps = read(ROOT / ".github/workflows/release.yml")["jobs"]["image"]["steps"]
    assert (ROOT / next(step["with"]["file"] for step in steps if "build-push" in step.get("uses", ""))).is_file()
