"""Two real vLLM servers of the small model, one of the large model, a gateway per arrangement, and the table of
figures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.programs.vllm import fleet
from tests.programs.vllm.figures import Figures
from tests.programs.vllm.fleet import Gateway, Server

_figures = Figures()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.timeout(900))  # a real server takes its time to start, and to answer under load
    items.sort(key=lambda item: item.path.name == "test_rescue.py")  # kills a server of all tests: the last one


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("measured on real vLLM")
        for figure in _figures:
            terminalreporter.write_line(str(figure))


@pytest.fixture(scope="session")
def figures() -> Figures:
    return _figures


def of_model(model: str, count: int) -> list[Server]:
    found = [server for server in fleet.servers() if server.model == model]
    if len(found) < count:
        pytest.skip(f"needs {count} vLLM servers of the {model} model: make vllm")
    return found[:count]


@pytest.fixture(scope="session")
def engines() -> list[Server]:
    """Both engines of the pair."""
    return of_model("small", 2)


@pytest.fixture(scope="session")
def pair(engines: list[Server]) -> Iterator[Gateway]:
    """One pool of two engines; the route `chat` has a budget that no request here misses."""
    routes = {"chat": {"tiers": ["small"], "ttft": {"budget": "30s"}}}
    with fleet.serving(fleet.config({"small": engines}, routes)) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def tiers(engines: list[Server]) -> Iterator[Gateway]:
    """The large model first; then the small model, on the other core, for long prompts that would miss 2.5 s on the
    large."""
    routes = {"chat": {"tiers": ["large", "small"], "ttft": {"budget": "2500ms"}}}
    pools = {"large": of_model("large", 1), "small": engines[1:]}
    with fleet.serving(fleet.config(pools, routes)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    """One engine, twice: as vLLM, and as a server that speaks chat alone."""
    [engine] = of_model("small", 1)
    config = fleet.config(
        {"native": [engine], "chat": [engine]}, {"native": {"tiers": ["native"]}, "chat": {"tiers": ["chat"]}}
    )
    config["pools"]["chat"]["backend"] = "compatible"
    with fleet.serving(config) as gateway:
        yield gateway
