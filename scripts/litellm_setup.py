"""Install LiteLLM's proxy for the comparison of imported files, once: `python scripts/litellm_setup.py`.

It goes into an environment of its own, `.cache/litellm-venv`, of 700 MB.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

VERSION = "1.108.7"
FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "litellm-venv"
PROGRAM = FOLDER / "bin" / "litellm"


def installed() -> str:
    """The version; empty: none."""
    found = list(FOLDER.glob("lib/python*/site-packages/litellm-*.dist-info"))
    return found[0].name.removeprefix("litellm-").removesuffix(".dist-info") if found and PROGRAM.is_file() else ""


def main() -> int:
    if installed() != VERSION:
        venv.create(FOLDER, with_pip=True, clear=True)
        pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*pip, "--prefer-binary", f"litellm[proxy]=={VERSION}"], check=False)
        if done.returncode:
            return done.returncode
    print(f"LiteLLM {VERSION} is ready in {PROGRAM}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
