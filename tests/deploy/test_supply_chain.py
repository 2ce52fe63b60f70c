"""The container image holds exactly the packages of docs/dependencies.md, in locked versions with hashes."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gateway.cli.arguments import EXPORTS

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = PYPROJECT["project"]
WHEEL = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
EXTRAS = {name: entries for name, entries in PROJECT["optional-dependencies"].items() if name != "dev"}
REQUIREMENTS = [Requirement(text) for entries in (PROJECT["dependencies"], *EXTRAS.values()) for text in entries]
LOCKED = re.compile(r"^([\w.-]+)==([\w.]+)(.*?)(?=^[\w.-]+==|\Z)", re.MULTILINE | re.DOTALL)
DOCUMENTED = re.compile(r"^\| ([\w-]+) \| (core|extra `[\w-]+`) \|", re.MULTILINE)
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text("utf-8")


def locked(name: str) -> dict[str, tuple[str, str]]:
    """Version and the rest of the entry, by package."""
    text = (ROOT / "deploy/locks" / name).read_text("utf-8")
    return {canonicalize_name(package): (version, rest) for package, version, rest in LOCKED.findall(text)}


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_the_image_has_a_locked_version_of_every_dependency(requirement: Requirement) -> None:
    """`make lock` is due where pyproject.toml asks for more than the lock has."""
    version, _ = locked("image.txt")[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version)


@pytest.mark.parametrize("name", ["image.txt", "build.txt"])
def test_every_locked_file_has_a_hash(name: str) -> None:
    assert all("--hash=sha256:" in rest for _, rest in locked(name).values())


def test_every_dependency_has_a_reason() -> None:
    """docs/dependencies.md lists the packages of pyproject.toml, with the same extras."""
    expected = {(Requirement(text).name, "core") for text in PROJECT["dependencies"]}
    expected |= {(Requirement(text).name, f"extra `{extra}`") for extra in EXTRAS for text in EXTRAS[extra]}
    assert set(DOCUMENTED.findall((ROOT / "docs/dependencies.md").read_text("utf-8"))) == expected


def test_the_image_installs_nothing_without_a_hash() -> None:
    installs = [line for line in DOCKERFILE.splitlines() if "pip install" in line]
    assert installs
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)


def ignored(path: str) -> bool:
    """By .dockerignore: the last pattern that fits the path, or a folder above, decides."""
    parts = path.split("/")
    above = {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
    found = False
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        if any(fnmatchcase(each, line.lstrip("!")) and each.count("/") == line.count("/") for each in above):
            found = not line.startswith("!")
    return found


def test_the_wheel_holds_all_that_is_exported() -> None:
    """At the same path below the package `gateway`."""
    folders = {pattern.rpartition("/")[0] for pattern in EXPORTS.values() if pattern.startswith("deploy/")}
    assert WHEEL["force-include"] == {folder: f"gateway/{folder}" for folder in sorted(folders)}


@pytest.mark.parametrize("source", [*WHEEL["packages"], *WHEEL["force-include"], "hatch_build.py", "pyproject.toml"])
def test_the_image_is_built_from_all_that_the_wheel_needs(source: str) -> None:
    """The Dockerfile copies it, and .dockerignore leaves it in the context."""
    assert (ROOT / source).exists()
    copied = {word for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()}
    assert {source, source.partition("/")[0]} & copied
    assert not ignored(source)
    assert ignored("deploy/config/fleet.yaml")


def test_the_image_runs_as_nobody_and_needs_no_shell() -> None:
    """Commands in exec form; the root file system is read-only in docker-compose.yml."""
    last = DOCKERFILE.rpartition("FROM ")[2]
    assert "\nUSER firsttoken\n" in last
    assert re.search(r'^ENTRYPOINT \["firsttoken"\]$', last, re.MULTILINE)
    compose = (ROOT / "docker-compose.yml").read_text("utf-8")
    assert "read_only: true" in compose
    assert "CMD-SHELL" not in compose
