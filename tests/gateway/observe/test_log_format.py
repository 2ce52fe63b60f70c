"""Log lines show the place of an error, and no data of requests."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.observe import log_format as logs
from gateway.observe.log_format import Formatter, described, unhandled

SECRET = "sk-secret"


@contextmanager
def logged() -> Iterator[io.StringIO]:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(Formatter(logs.FORMAT))
    log = logging.getLogger("firsttoken")
    log.addHandler(handler)
    try:
        yield out
    finally:
        log.removeHandler(handler)


def fail() -> None:
    try:
        int(SECRET)
    except ValueError as error:
        raise RuntimeError(SECRET) from error


def test_of_an_exception_kinds_and_frames_are_logged() -> None:
    """Messages may quote the data that caused them; causes are hidden too."""
    with logged() as out:
        try:
            fail()
        except RuntimeError:
            logging.getLogger("firsttoken").exception("internal error on request %s", "req-1")
    said = out.getvalue()
    assert "internal error on request req-1" in said
    assert said.index("ValueError") < said.index("which led to:") < said.index("RuntimeError")
    assert "in fail" in said
    assert SECRET not in said


def test_all_of_it_is_there_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIRSTTOKEN_DEBUG=1, on a machine of one's own."""
    monkeypatch.setattr(logs, "DEBUG", True)
    with logged() as out:
        try:
            fail()
        except RuntimeError:
            logging.getLogger("firsttoken").exception("internal error")
    assert SECRET in out.getvalue()


def test_groups_and_circles_are_described_too() -> None:
    """Of a group each; a circle once."""
    one, other = ValueError(SECRET), KeyError(SECRET)
    one.__cause__, other.__cause__ = other, one
    said = described(ExceptionGroup(SECRET, [one, RuntimeError(SECRET)]))
    assert [kind in said for kind in ("ExceptionGroup", "ValueError", "KeyError", "RuntimeError")] == [True] * 4
    assert SECRET not in said


async def test_a_task_that_nobody_awaited_is_logged_without_its_message() -> None:
    """asyncio's own handler shows the task, and the task shows the exception."""

    async def work() -> None:
        raise RuntimeError(SECRET)

    asyncio.get_running_loop().set_exception_handler(unhandled)
    with logged() as out:
        task = asyncio.get_running_loop().create_task(work())
        await asyncio.wait([task])
        del task
    assert "Task exception was never retrieved" in out.getvalue()
    assert "in work" in out.getvalue()
    assert SECRET not in out.getvalue()
