"""Shared by the benchmarks: child processes pinned to a core, free ports, and resource use of processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
READY = 60.0  # s until a child must listen: a gateway starts in 5 s on a busy core
STOPPING = 5.0  # s until a child must end
HIGHEST = -20  # priority


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def child(
    command: Sequence[str], port: int, core: int | None = None, *, quiet: bool = False, patience: float = READY
) -> Iterator[int]:
    """Runs `command` until the block ends; yields its process id once it listens on `port`, within `patience` s."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if quiet else None,
        preexec_fn=None if core is None else lambda: pin(core),
    )
    try:
        wait_for(port, process, patience)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOPPING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def ahead_of_others() -> Iterator[None]:
    """Run the processes of this session before all others of the machine, where that is allowed: by root, on Linux.

    A proxy that needs more CPU waits longer for its turn on a busy machine, so its figures would tell of the others.
    Between sessions the kernel compares the priorities of the sessions alone (sched(7), autogroup), not those of
    processes.
    """
    group = Path("/proc/self/autogroup")
    with suppress(OSError):
        group.write_text(str(HIGHEST))
    try:
        yield
    finally:
        with suppress(OSError):
            group.write_text("0")


def pin(core: int) -> None:
    """Pin this process to one core; with a single core, to core 0."""
    os.sched_setaffinity(0, {core % (os.cpu_count() or 1)})


def wait_for(port: int, process: subprocess.Popen[bytes], patience: float = READY) -> None:
    """Raises TimeoutError, or ChildProcessError if the process has ended."""
    ends = time.monotonic() + patience
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise ChildProcessError(f"it ended with {process.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


def gateway(port: int, *urls: str) -> list[str]:
    """The command of a gateway which routes every model name over these servers."""
    return [sys.executable, "-m", "benchmarks.serve", str(port), *urls]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads and children (from schedstat, in ns)."""
    pids = [pid, *_children(pid)]
    return sum(_cpu(task) for each in pids for task in Path(f"/proc/{each}/task").glob("*")) / 1e9


def _cpu(task: Path) -> int:
    return int((task / "schedstat").read_text().split()[0])


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for each in map(int, children.read_text().split()):
            found += [each, *_children(each)]
    return found


def resident(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class MachineTime:
    """Ticks of all cores since boot: total, and stolen by the host."""

    total: int
    stolen: int

    @classmethod
    def now(cls) -> MachineTime:
        ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return cls(sum(ticks), ticks[7])

    def stolen_since(self, before: MachineTime) -> float:
        """As a share."""
        return (self.stolen - before.stolen) / max(self.total - before.total, 1)
