"""Restart without a refused connection: the listening sockets pass to a new process before the old process drains.

On SIGUSR2 a process starts its own command anew, with its listening sockets as open files. The new process reads code
and configuration, listens on these sockets, and reports that it serves; then the old process stops to accept and
drains. The sockets stay open all the time, so a connection waits in the kernel at worst. If the new process ends
without a report, or reports nothing for PATIENCE, the old process serves on.

Under systemd (`Type=notify`) the new process becomes the main process of the service.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from gateway.config.field_types import ListenAddress
from gateway.process import bind, target_of

log = logging.getLogger("firsttoken")

SOCKETS = "FIRSTTOKEN_SOCKETS"  # in the environment: keys of the configuration and open files, `server.listen=5 ...`
REPORT = "FIRSTTOKEN_REPORT"  # the open file on which a new process reports that it serves
PATIENCE = 120.0  # s for a new process to load its files
SERVES = b"1"
# s for which the old process answers on connections that callers keep: longer than the keep-alive of SDKs (httpx: 5 s).
LINGER = 6.0


def bind_or_inherit(address: ListenAddress, key: str) -> socket.socket:
    """The socket that an old process has passed for a key of the configuration, if it is bound to `address`, else a new
    one. Raises OSError."""
    passed = dict(each.split("=") for each in os.environ.get(SOCKETS, "").split())
    if key not in passed:
        return bind(address)
    found = socket.socket(fileno=os.dup(int(passed[key])))
    if address.port in (0, found.getsockname()[1]) and target_of(address)[2][0] == found.getsockname()[0]:
        return found
    found.close()
    return bind(address)


def report_serving() -> None:
    """Tell the old process, and systemd, that this process serves. The files that it was given are closed: its own
    children get none."""
    for passed in os.environ.pop(SOCKETS, "").split():
        os.close(int(passed.partition("=")[2]))
    if report := os.environ.pop(REPORT, ""):
        os.write(int(report), SERVES)
        os.close(int(report))
    notify_systemd("READY=1")


async def hand_over(sockets: Mapping[str, socket.socket]) -> bool:
    """Start the command of this process anew with `sockets`, by configuration key. True: the new process serves.
    A cancellation stops the new process."""
    read, write = os.pipe()
    files = {key: each.fileno() for key, each in sockets.items()}
    passed = " ".join(f"{key}={number}" for key, number in files.items())
    environment = {**os.environ, SOCKETS: passed, REPORT: str(write)}
    try:
        command = [sys.executable, *sys.orig_argv[1:]]
        process = subprocess.Popen(command, env=environment, pass_fds=(write, *files.values()))  # noqa: ASYNC220
    except OSError as error:
        log.error("no new process: %s; this process serves on", error)
        os.close(read)
        return False
    finally:
        os.close(write)
    try:
        serves = await _reported(read)
    except asyncio.CancelledError:
        process.terminate()  # by SIGTERM: accepted requests are answered first
        log.info("process %d, which was to serve in place of process %d, is stopped too", process.pid, os.getpid())
        raise
    if serves:
        log.info("process %d serves in place of process %d, which drains", process.pid, os.getpid())
        notify_systemd(f"MAINPID={process.pid}")
        return True
    process.kill()
    log.error("the new process did not serve (exit code %s); process %d serves on", process.wait(), os.getpid())
    return False


async def _reported(read: int) -> bool:
    """Waits for the report; takes over the open file. False: the process ended, or the time is over."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(read, readable.set)
    try:
        async with asyncio.timeout(PATIENCE):
            await readable.wait()
        return os.read(read, 1) == SERVES
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(read)
        os.close(read)


def notify_systemd(state: str) -> None:
    """Datagram to the service manager (sd_notify(3)); nothing without one."""
    if not (path := os.environ.get("NOTIFY_SOCKET")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        try:
            channel.connect(f"\0{path[1:]}" if path.startswith("@") else path)
            channel.send(state.encode())
        except OSError as error:
            log.warning("systemd was not told %s: %s", state, error)
