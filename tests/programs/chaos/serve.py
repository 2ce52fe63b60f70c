"""`firsttoken serve` with a SIGUSR1 handler: writes the number of asyncio tasks to $CHAOS_TASKS."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from gateway.cli.main import main


def write_tasks(*_: object) -> None:
    target = Path(os.environ["CHAOS_TASKS"])
    target.with_suffix(".new").write_text(str(len(asyncio.all_tasks())))
    target.with_suffix(".new").rename(target)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, write_tasks)
    sys.exit(main(["serve", *sys.argv[1:]]))
