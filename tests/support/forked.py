"""The command line in a process forked from one that has imported it, in a tenth of the time of a start.

- One such parent for a test run, or for each of its workers, started by the first test that needs it.
- A forked command has its own arguments, variables, output and signals, and ends as any process does. Between parent
  and command stands a process that waits for the end of the command and writes the exit code.
- Tests of the start itself run `python -m gateway.cli` instead.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRELOADED = (  # beside what these import: a command imports its own modules when it is run
    "gateway.serve",
    "gateway.reload",
    "gateway.config.notes",
    "gateway.cli.config_commands",
    "gateway.parts.picker.picker_service",
    "gateway.workers.supervisor",
)
LARGEST = 1 << 20  # bytes of a request: arguments and variables


class ForkedProcess:
    """As far as tests use asyncio's Process. `pid` is the command's own."""

    def __init__(self, pid: int, out: asyncio.StreamReader, err: asyncio.StreamReader) -> None:
        self.pid, self.stdout, self.stderr = pid, out, err
        self.returncode: int | None = None
        self._pipes: list[asyncio.ReadTransport] = []
        self._watching: asyncio.Task[None] | None = None

    def watch(self, status: asyncio.StreamReader, *pipes: asyncio.ReadTransport) -> None:
        self._pipes += pipes
        self._watching = asyncio.create_task(self._watch(status))

    async def _watch(self, status: asyncio.StreamReader) -> None:
        self.returncode = int(await status.readline())

    async def wait(self) -> int:
        assert self._watching is not None
        await asyncio.shield(self._watching)
        assert self.returncode is not None
        return self.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        out, err = await asyncio.gather(self.stdout.read(), self.stderr.read())
        await self.wait()
        return out, err

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # its end is not read yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()


async def forked(*arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> ForkedProcess:
    """`firsttoken` with these arguments. `env`: None: the variables of this process."""
    reading, writing = zip(*(os.pipe() for _ in range(3)), strict=True)
    asked = {"arguments": arguments, "cwd": str(cwd), "env": dict(os.environ if env is None else env)}
    try:
        socket.send_fds(_parent(), [json.dumps(asked).encode()], writing)
    finally:
        for end in writing:
            os.close(end)
    (out, out_pipe), (err, err_pipe), (status, status_pipe) = [await _reader(end) for end in reading]
    process = ForkedProcess(int(await status.readline()), out, err)
    process.watch(status, out_pipe, err_pipe, status_pipe)
    return process


async def _reader(end: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(end, "rb", 0))
    return reader, transport


@cache
def _parent() -> socket.socket:
    """Starts the parent, which ends with the socket."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
    with its:
        command = [sys.executable, "-m", "tests.support.forked", str(its.fileno())]
        subprocess.Popen(command, cwd=ROOT, pass_fds=[its.fileno()], stdout=subprocess.DEVNULL)
    return ours


# --------------------------------------------------------------------------- in the parent


def fork_what_is_asked(control: socket.socket) -> None:
    """Returns at the end of the test run."""
    from gateway.cli.main import main
    from gateway.tokenize.tokenizers import encoder

    for name in PRELOADED:
        importlib.import_module(name)
    encoder("o200k_base").count("warm")
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a child of this process
    while True:
        asked, descriptors, _, _ = socket.recv_fds(control, LARGEST, 3)
        if not asked:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            break
        for descriptor in descriptors:
            os.close(descriptor)
    out, err, status = descriptors
    if (pid := os.fork()) != 0:
        _tell_the_end(pid, out, err, status)
    os.close(status)
    for descriptor, standard in ((out, 1), (err, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    request = json.loads(asked)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    gc.unfreeze()
    sys.exit(main(request["arguments"]))


def _tell_the_end(pid: int, out: int, err: int, status: int) -> None:
    os.close(out)
    os.close(err)
    os.write(status, b"%d\n" % pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # of a whole process group, they are the command's
        signal.signal(number, signal.SIG_IGN)
    _, ended = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


if __name__ == "__main__":
    fork_what_is_asked(socket.socket(fileno=int(sys.argv[1])))
