"""Find Prometheus and promtool, or fetch Debian's package, once and without root.

    python scripts/prometheus_setup.py

Looks on PATH, then in `.cache/prometheus`, where the package is unpacked: nothing is installed, and no service is
started. `make test` runs this first. Without apt or network the script prints so and exits with 0: the tests which need
Prometheus are then skipped, with the reason.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "prometheus"
NAMES = ("prometheus", "promtool")
TIMEOUT = 300.0  # s for apt


def found() -> dict[str, Path] | None:
    """Both programs, or None."""
    for folder in (None, str(FOLDER / "usr" / "bin")):
        paths = [shutil.which(name, path=folder) for name in NAMES]
        if all(paths):
            return {name: Path(path) for name, path in zip(NAMES, paths, strict=True) if path}
    return None


def run(command: Sequence[str], cwd: Path) -> None:
    """Raises OSError without the program, RuntimeError with its last output on failure."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"{' '.join(command[:2])} failed: {words[-1] if words else done.returncode}")


def download(folder: Path) -> Path:
    """With the system's package lists; without any, with lists in a private folder, which need no root."""
    try:
        run(["apt-get", "download", "prometheus"], folder)
    except RuntimeError:
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        own = ["-o", f"Dir::State::lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
        run(["apt-get", *own, "update"], folder)
        run(["apt-get", *own, "download", "prometheus"], folder)
    return next(folder.glob("prometheus_*.deb"))


def install() -> None:
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
        package = download(Path(scratch))
        unpacked = Path(scratch) / "unpacked"
        run(["dpkg", "-x", str(package), str(unpacked)], Path(scratch))
        shutil.rmtree(FOLDER, ignore_errors=True)
        unpacked.rename(FOLDER)


def main() -> int:
    if found() is not None:
        return 0
    try:
        install()
    except (OSError, RuntimeError, StopIteration, subprocess.TimeoutExpired) as error:
        print(f"no Prometheus, so the tests that need it are skipped: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
