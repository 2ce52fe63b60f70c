"""The fast tokenizer beside its references: time, what the time tells other tenants, memory, and the GIL.

    python -m benchmarks.tokenizer_cost [times|tenants|memory|gil ...] [--json FILE] [--rounds N]

- times: ms of CPU of an estimate (recognise, encode, hash), of Python sources never seen, interleaved; with o200k_base
  and a tokenizer.json (`--json`; trained here otherwise). "after another tenant": the words were dropped before.
- tenants: AUC of guessing from the time of one's own prompt whether another tenant has sent its text, or another text.
  0.5: the time tells nothing. "words kept" is the control: what the time would tell if words were not dropped.
- memory: MB of RSS after load, and at most more during 1 GB of random text of four kinds.
- gil: the longest time for which one segment of hostile text holds the interpreter.
"""

from __future__ import annotations

import asyncio
import gc
import random
import string
import subprocess
import sys
import sysconfig
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from functools import cache
from math import inf
from pathlib import Path
from statistics import median
from time import thread_time

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from backends.interface import Operation
from gateway.tokenize.estimator import Estimator, TokenizerConfig
from gateway.tokenize.fast_tokenizer import FastTokenizer
from gateway.tokenize.prompt import Prompt, prompt_of
from gateway.tokenize.tokenizers import SEGMENT_MAX, Encoder, encoder
from policies.latency.token_counts import TokenScale

ROUNDS = 60
TRIALS = 300  # of each kind: the standard error of an AUC of 0.5 is 0.024
PROBES = (1_000, 8_000, 32_000)  # characters
THIRD = 8_000
MEGABYTES = 1000
ALPHABETS = {
    "words": string.ascii_lowercase + "     ",
    "one word": string.ascii_lowercase,
    "CJK": "".join(map(chr, range(0x4E00, 0x9FA5))),
    "any": "".join(map(chr, [*range(32, 0x250), *range(0x370, 0x600), *range(0x1F300, 0x1F700)])),
}
HOSTILE = {**ALPHABETS, **{repr(each): each for each in ("a", " ", "\n", "ab", "!?", "\0", "好", "😀", "\u0301", "ก")}}


@cache
def sources() -> str:
    """Python's standard library, in random order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    files = [file for file in files if "site-packages" not in file.parts]
    random.Random(1).shuffle(files)
    return "".join(file.read_text("utf-8", "replace") for file in files)


def unseen() -> Callable[[int], str]:
    """Cuts texts of a given size out of the sources, none twice."""
    at = 0

    def take(size: int) -> str:
        nonlocal at
        at += size
        return sources()[at - size : at]

    return take


def trained(folder: Path) -> str:
    """Path of a byte-level tokenizer.json with 16,000 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=16_000, initial_alphabet=alphabet, show_progress=False)
    text = sources()[-2_000_000:]
    tokenizer.train_from_iterator([text[at : at + 5000] for at in range(0, len(text), 5000)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def only_reference(name: str) -> Encoder:
    return Encoder(encoder(name)._pack)


def fast_part(name: str) -> FastTokenizer:
    fast = encoder(name)._fast
    assert fast is not None, f"{name}: no fast tokenizer"
    return fast


class TokenizerBench:
    """An estimator in this thread."""

    def __init__(self, encoder: Encoder) -> None:
        pools = {"p": TokenizerConfig("any")}
        self.estimator = Estimator(pools, lambda pool: TokenScale(), encoders=lambda name: encoder, inline=inf)
        self.loop = asyncio.new_event_loop()

    def seconds(self, prompt: Prompt, group: str) -> float:
        started = thread_time()
        self.loop.run_until_complete(self.estimator.estimate(prompt, ["p"], group, 1))
        return thread_time() - started


def chat(*texts: str) -> Prompt:
    """Of copies, as every request brings its own bytes: a string knows its hash from the second time on."""
    copies = [text.encode().decode() for text in texts]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(copies)]
    return prompt_of(Operation.CHAT, {"model": "m", "messages": messages})


# -- times -------------------------------------------------------------------------------------


def times(name: str, rounds: int) -> None:
    take, pick = unseen(), random.Random(0)
    benches = {"reference": TokenizerBench(only_reference(name)), "fast": TokenizerBench(encoder(name))}
    cases: dict[str, tuple[int, int, str]] = {  # characters known before, new ones, whose text came before
        **{f"{size / 1000:g} KB never seen": (0, size, "a") for size in (500, 2_000, 8_000, 100_000)},
        "100 KB, all but 1 KB seen": (100_000, 1_000, "a"),
        **{f"{size / 1000:g} KB never seen, after another tenant": (0, size, "b") for size in (2_000, 8_000, 100_000)},
    }
    found: dict[tuple[str, str], list[float]] = {(case, who): [] for case in cases for who in benches}
    for _ in range(rounds):
        for case, (seen, new, before) in cases.items():
            for who in pick.sample(sorted(benches), 2):
                known = [take(2_000) for _ in range(seen // 2_000)]
                benches[who].seconds(chat(*known), "a")
                benches["fast"].seconds(chat(take(20_000)), before)
                found[case, who].append(benches[who].seconds(chat(*known, take(new)), "a"))
    print(f"\n| {Path(name).name}, ms | reference | fast | ratio |\n|---|---|---|---|")
    for case in cases:
        slow, fast = (1e3 * median(found[case, who]) for who in ("reference", "fast"))
        print(f"| {case} | {slow:.3f} | {fast:.3f} | {fast / slow:.2f} |", flush=True)


# -- tenants -----------------------------------------------------------------------------------


def tenants(name: str) -> None:
    """The probed texts are random words: a text of them repeats few words of another."""
    fast = fast_part(name)
    always = FastTokenizer(fast._pack, fast._drop_words, fast.speed, worth=0.0)
    never = FastTokenizer(fast._pack, lambda: None, fast.speed, worth=0.0)
    each = {
        "reference": only_reference(name),
        "fast": encoder(name),
        "fast, words dropped for every text": Encoder(fast._pack, always),
        "fast, words kept": Encoder(fast._pack, never),
    }
    benches = {label: TokenizerBench(encoder_) for label, encoder_ in each.items()}
    rows: dict[str, list[str]] = {label: [] for label in each}
    for size in PROBES:
        for label, (hits, misses) in probes(benches, size).items():
            rows[label].append(f"{auc(hits, misses):.3f}")
    print(f"\n| {Path(name).name}, AUC | {' | '.join(f'{size} characters' for size in PROBES)} |")
    print("|---" * (1 + len(PROBES)) + "|")
    for label, cells in rows.items():
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


def probes(benches: Mapping[str, TokenizerBench], size: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of a prompt of one tenant, where another has sent this text, and where it has sent another text. A third
    tenant's prompt comes between: a text repeated at once is faster by what is left in the processor's caches, whatever
    the tokenizer."""
    pick = random.Random(size)
    sent: dict[str, tuple[list[float], list[float]]] = {label: ([], []) for label in benches}
    for hit in pick.sample([True, False] * TRIALS, 2 * TRIALS):
        for label in pick.sample(sorted(benches), len(benches)):
            text, other, third = (random_text(pick, "words", length) for length in (size, size, THIRD))
            benches[label].seconds(chat(text if hit else other), "victim")
            benches[label].seconds(chat(third), "third")
            sent[label][0 if hit else 1].append(benches[label].seconds(chat(text), "tenant"))
    return sent


def auc(hits: list[float], misses: list[float]) -> float:
    """Probability that a hit is faster than a miss."""
    return sum((hit < miss) + 0.5 * (hit == miss) for hit in hits for miss in misses) / len(hits) / len(misses)


def random_text(pick: random.Random, kind: str, size: int) -> str:
    return "".join(pick.choices(ALPHABETS[kind], k=size))


# -- memory ------------------------------------------------------------------------------------


def memory(name: str, megabytes: int) -> None:
    print(f"\n| {Path(name).name}, MB of RSS | loaded | in {megabytes} MB |\n|---|---|---|", flush=True)
    for case in ("reference", *ALPHABETS):
        command = [sys.executable, "-m", "benchmarks.tokenizer_cost", "grow", case, name, str(megabytes)]
        print(f"| {case} | {' | '.join(subprocess.check_output(command, text=True).split())} |", flush=True)


def grow(case: str, name: str, megabytes: int) -> None:
    """One process: loads, reads, and prints both figures."""
    pick, kind = random.Random(case), case if case in ALPHABETS else "words"
    if case == "reference":
        sys.modules["splintr"] = None  # type: ignore[assignment]
    found = encoder(name)
    assert (case == "reference") == (found._fast is None)
    gc.collect()
    loaded, read = resident(), 0
    most = loaded
    while read < megabytes * 1_000_000:
        text = random_text(pick, kind, 200_000)
        for start in range(0, len(text), SEGMENT_MAX):  # a text of the alphabet, its parts moved, is as new
            cut = text[start:] + text[:start]
            read += len(cut[: SEGMENT_MAX * 16].encode())
            found.count(cut[: SEGMENT_MAX * 16])
            most = max(most, resident())
    print(f"{loaded:.0f} {most - loaded:+.0f}")


def resident() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmRSS"))


# -- GIL ---------------------------------------------------------------------------------------


def gil(name: str) -> None:
    fast, pick = fast_part(name), random.Random(0)
    worst: dict[str, float] = {}
    for kind, alphabet in HOSTILE.items():
        for _ in range(5):
            fast._drop_words()
            text, started = "".join(pick.choices(alphabet, k=SEGMENT_MAX)), thread_time()
            fast._pack(text)
            worst[kind] = max(worst.get(kind, 0.0), thread_time() - started)
    kind = max(worst, key=worst.__getitem__)
    started = thread_time()
    fast._drop_words()
    dropping = thread_time() - started
    print(f"\n{Path(name).name}: {1e3 * worst[kind]:.2f} ms for {kind}; {1e3 * dropping:.2f} ms to drop words")


def main() -> None:
    if sys.argv[1:2] == ["grow"]:
        grow(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    parser = ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["times", "tenants", "memory", "gil"])
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = ["o200k_base", given.json or trained(Path(folder))]
        for name in names:
            if "times" in given.parts:
                times(name, given.rounds)
            if "tenants" in given.parts:
                tenants(name)
            if "gil" in given.parts:
                gil(name)
        if "memory" in given.parts:
            memory(names[0], given.megabytes)


if __name__ == "__main__":
    main()
