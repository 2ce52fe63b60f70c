"""aider's command line, without a terminal. All settings are those of docs/agents.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import check, expect, main

AIDER = Path(sys.executable).with_name("aider")
TEXT = os.environ["TEXT"]
CHANGE = "change note.txt to: `two`"


def aider(prompt: str, **more: str) -> tuple[str, str]:
    """Output of a run in a folder of its own, and the file that it may edit."""
    agent = json.loads(os.environ["AGENTS"])["aider"]
    home = Path(tempfile.mkdtemp())
    for path, text in agent["files"].items():
        home.joinpath(path.removeprefix("~/")).write_text(text)
    note = home / "note.txt"
    note.write_text("one\n")
    asked = [AIDER, "--yes-always", "--no-git", "--no-check-update", "--message", prompt, "note.txt"]
    env = {"PATH": os.environ["PATH"], "HOME": str(home), **agent["variables"], **more}
    done = subprocess.run(asked, cwd=home, env=env, capture_output=True, text=True, timeout=120, check=False)
    return " ".join((done.stdout + done.stderr).split()), note.read_text()


@check("chat: stream")
def stream() -> None:
    out, _ = aider("hello")
    expect(TEXT in out, out)


@check("a file is edited")
def edited() -> None:
    out, note = aider(CHANGE)
    expect(note.strip() == "two", out)


@check("error 401")
def wrong_key() -> None:
    out, _ = aider("hello", OPENAI_API_KEY="sk-wrong")
    expect("API key" in out, out)


main("aider-chat")
