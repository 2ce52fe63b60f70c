"""Figures of the structure: `python -m tests.programs.house`.

Lines and files of the product and of its core, and the core files that contain the words of a feature which is a part,
or is to become one: a core that names no feature has none.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from gateway.cli.tables import aligned

ROOT = Path(__file__).parents[2]
PRODUCT = ("gateway", "policies", "backends")
CORE = (  # what has to be known before a first change
    *(
        "gateway/core",
        "gateway/proxy.py",
        "gateway/request_steps.py",
        "gateway/request_steps.py",
        "gateway/scheduler.py",
    ),
    *("gateway/runtime.py", "gateway/wiring.py", "gateway/app.py", "gateway/upstream", "policies/attempts"),
    *("policies/blame", "policies/queue", "policies/routing", "policies/fleet", "policies/latency/ttft_predictor.py"),
    *("policies/latency/tpot.py", "policies/types.py", "gateway/observe/timeline.py", "gateway/observe/record.py"),
)
WORDS: Mapping[str, str] = {
    "rescue": r"rescu",
    "adapters": r"\blora|adapter",
    "escalation": r"escalat|shortcoming",
    "effort": r"\befforts\b|reasoning_effort",
    "batch work": r"batch work|valley|hurry",
    "regions": r"\bregion",
    "callers' keys": r"caller_key|callers'? own key",
    "external share": r"limits\.external|external_share",
    "kept state": r"\bthreads?_|has_thread|state_id|sealed",
    "cache of answers": r"answer_cache|answercache",
    "repair": r"\brepair",
    "fair share": r"fair share|fair_share|above its share",
    "prefix doctor": r"doctor",
    "picker": r"picker",
}


def files(*places: str) -> list[Path]:
    found = [ROOT / place for place in places if (ROOT / place).exists()]
    return sorted({each for place in found for each in ([place] if place.suffix else place.rglob("*.py"))})


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def naming(words: str, paths: list[Path]) -> list[str]:
    """The names of the files that contain one of the words."""
    pattern = re.compile(words, re.IGNORECASE)
    return [path.name for path in paths if pattern.search(path.read_text("utf-8"))]


def report() -> Iterator[str]:
    product, core = files(*PRODUCT), files(*CORE)
    tests = files("tests")
    yield f"product: {lines(product):,} lines, {len(product)} files; tests: {lines(tests):,} lines"
    yield f"core: {lines(core):,} lines, {len(core)} files"
    found = [(name, naming(words, core)) for name, words in WORDS.items()]
    yield from aligned(
        [("words of", "core files"), *((name, f"{len(where)}  {' '.join(where)}") for name, where in found)]
    )


def main() -> None:
    print("\n".join(report()))
    subprocess.run([sys.executable, "-m", "benchmarks.request_path"], check=True, cwd=ROOT)  # calls and files


if __name__ == "__main__":
    main()
