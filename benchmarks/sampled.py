"""A gateway with a CPU sampler: `sampled.py FILE PORT URL...`, for `profile_request.py`.

The kernel's profiling timer interrupts the process after each bit of CPU time, and the interpreter calls
`Sampler.sample` at the next safe point: after the current call, or at the entry of the next function. Time up to an
entry belongs to the caller, or to the event loop without a caller. A sample counts as the CPU time since the last;
other threads' time is separate. SIGUSR1 writes the samples since the last write to FILE, and starts anew.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections import Counter
from dis import opmap
from functools import cache
from pathlib import Path
from time import process_time, thread_time
from types import CodeType, FrameType

from benchmarks.serve import main

INTERVAL = 0.001  # s of CPU; the kernel's tick may be longer
RESUME = opmap["RESUME"]


class Sampler:
    """`used`: s by stack, the innermost first. `threads`, `garbage`: s of other threads, and of collections."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin()

    def begin(self) -> None:
        self.used = Counter[tuple[CodeType, ...]]()
        self.threads = self.garbage = 0.0
        self.main, self.process = thread_time(), process_time()

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self.sample)
        signal.signal(signal.SIGUSR1, self.write)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)
        gc.callbacks.append(self.collecting)

    def sample(self, _signal: int, frame: FrameType | None) -> None:
        main, process = thread_time(), process_time()
        used = main - self.main
        self.threads += max(process - self.process - used, 0.0)
        self.main, self.process = main, process
        if frame is not None and frame.f_lasti <= entry(frame.f_code):
            frame = frame.f_back
        stack = []
        while frame is not None:
            stack.append(frame.f_code)
            frame = frame.f_back
        self.used[tuple(stack)] += used  # type: ignore[assignment]

    def collecting(self, phase: str, _info: dict[str, int]) -> None:
        self.garbage += thread_time() if phase == "stop" else -thread_time()

    def write(self, _signal: int, _frame: FrameType | None) -> None:
        found, ready = {"threads": self.threads, "garbage": self.garbage}, self.path.with_suffix(".ready")
        taken = self.used
        self.begin()  # first: writing is sampled too
        stacks = [([(c.co_filename, c.co_qualname) for c in stack], used) for stack, used in taken.items()]
        ready.write_text(json.dumps({"stacks": stacks, **found}))
        os.replace(ready, self.path)


@cache
def entry(code: CodeType) -> int:
    """At a function's entry, before its first instruction."""
    return 2 * code.co_code[::2].index(RESUME)


if __name__ == "__main__":
    Sampler(Path(sys.argv[1])).start()
    sys.exit(main(int(sys.argv[2]), sys.argv[3:]))
