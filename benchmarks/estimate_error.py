"""Error of estimated prompt tokens beside the exact count, of prompts never seen: `estimate_error.py [PROMPTS]`.

A key sends PROMPTS prompts of a kind (o200k_base); each is estimated, and counted afterwards, as the gateway does. The
error is |estimated / counted - 1|: of the first prompt, and the median and p90 of all after the fifth. `rough`: share
of the prompts that the gateway would count before the send.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median, quantiles

from backends.interface import Operation
from benchmarks.prompts import Writer
from gateway.tokenize.estimator import Estimator
from gateway.tokenize.prompt import prompt_of
from gateway.tokenize.prompt_reader import PromptText, TokenizerConfig
from policies.latency.token_counts import TokenScale
from policies.routing.candidates import ROUGH

PROMPTS = 40
SIZES = (2_000, 8_000, 32_000)  # characters
FIRST = 5  # prompts that teach alone
GENERATED = {"site-packages", "encodings", "pydoc_data"}  # and what is not of the library


def sources(pattern: str, folder: Path) -> str:
    """Texts of files, in random order."""
    files = [file for file in sorted(folder.rglob(pattern)) if not GENERATED & {*file.parts}]
    Random(1).shuffle(files)
    return "".join(file.read_text("utf-8", "replace") for file in files[:400])


def cuts(text: str, size: int) -> Iterator[str]:
    for start in range(0, len(text) - size, size):
        yield text[start : start + size]


def errors(texts: Iterator[str], prompts: int) -> tuple[list[float], float]:
    """By prompt, and the share of rough estimates."""
    estimator = Estimator({"p": TokenizerConfig()}, lambda pool: TokenScale())
    found, rough = [], 0
    for text in texts:
        asked = PromptText(prompt_of(Operation.COMPLETION, {"prompt": text}), ["p"], key="web")
        guess = estimator.estimate(asked).pools["p"]
        for _ in estimator.count(asked):
            pass
        found.append(abs(guess.text_tokens / estimator.estimate(asked).pools["p"].text_tokens - 1))
        rough += guess.margin > ROUGH * guess.tokens
        if len(found) == prompts:
            break
    estimator.close()
    return found, rough / len(found)


def main() -> None:
    prompts = int(sys.argv[1]) if len(sys.argv) > 1 else PROMPTS
    code = sources("*.py", Path(sysconfig.get_path("stdlib")))
    pages = sources("*.md", Path(__file__).parent.parent)
    print("| prompts | first | median | p90 | rough |\n|---|---|---|---|---|")
    for size in SIZES:
        writer = Writer(size)
        kinds = {
            "of the benchmarks": (writer.text(size) for _ in range(prompts)),
            "standard library": cuts(code, size),
            "this project's pages": cuts(pages, size),
        }
        for kind, texts in kinds.items():
            found, rough = errors(texts, prompts)
            later = found[FIRST:]
            cells = f"{found[0]:.3f} | {median(later):.3f} | {quantiles(later, n=10)[-1]:.3f} | {rough:.2f}"
            print(f"| {size / 1000:g} KB, {kind} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
