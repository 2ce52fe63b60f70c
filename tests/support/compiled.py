"""Pytest plugin of `make test-compiled`: the tests run against compiled modules, or not at all."""

from __future__ import annotations

import importlib

import pytest
from _pytest._code.code import TracebackEntry

COMPILED = ("backends.stream.taps", "gateway.proxy", "gateway.upstream.dispatcher", "policies.routing.tiers")


def pytest_configure(config: pytest.Config) -> None:
    for name in COMPILED:
        path = importlib.import_module(name).__file__ or ""
        if path.endswith(".py"):
            raise pytest.UsageError(f"{path} is interpreted")
    # mypyc 2.4 gives some frames no line, on which pytest 9 fails when it shows a traceback
    TracebackEntry.lineno = property(lambda entry: (entry._rawentry.tb_lineno or 1) - 1)  # type: ignore[assignment,method-assign]
