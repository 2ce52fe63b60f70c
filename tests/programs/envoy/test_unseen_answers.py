"""Answers whose bodies Envoy does not show, or at their end alone, before the real Envoy without an access log:
`make envoy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.observe.record import AnswerSight, RequestOutcome
from scripts.envoy_setup import VERSIONS
from tests.programs.envoy.test_conformance import manager
from tests.programs.envoy.test_envoy import ROUTES, ask, chat
from tests.support.envoy import configuration, deployed, running_envoy
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines, eventually


def unseen(picker: str, urls: list[str], *, duplex: bool, mode: str = "NONE") -> dict[str, Any]:
    """The deployed configuration, with this body mode for answers."""
    config = configuration(deployed(), [picker], urls, duplex=duplex)
    of_answers = {"response_body_mode": mode, "response_trailer_mode": "SKIP"}
    manager(config)["http_filters"][0]["typed_config"]["processing_mode"] |= of_answers
    manager(config).pop("access_log")
    return config


@pytest.mark.parametrize(
    ("version", "duplex"), [*((each, True) for each in VERSIONS), ("1.36.4", False), ("1.40.0", False)]
)
async def test_first_token_and_end_of_an_unseen_answer_are_told_by_its_engine(
    tmp_path: Path, version: str, duplex: bool
) -> None:
    """In FULL_DUPLEX_STREAMED the call ends with the head of the answer; in BUFFERED too with Envoy 1.38.3, where the
    answer counts as over then."""
    async with (
        engines(1) as servers,
        running({"only": engine_pool(*servers)}, ROUTES, pick={"listen": "127.0.0.1:0"}) as gateway,
        aiohttp.ClientSession() as session,
    ):
        assert gateway.picker is not None
        config = unseen(gateway.picker.url, [server.url for server in servers], duplex=duplex)
        async with running_envoy(tmp_path, version, config) as url:
            await eventually(lambda: all(load.scraped_at > 0 for load in gateway.monitor.loads().values()))
            status, answer = await ask(session, url, {**chat("hello"), "max_tokens": 300})
            assert (status, answer.endswith(b"data: [DONE]\n\n")) == (200, True)
            tokens = answer.count(b"data: ") - 2  # the role, and [DONE]
            await eventually(lambda: gateway.recorder.live == 0)
        (record,) = gateway.recorder.recent
        assert (record.end, record.sight) == (RequestOutcome.COMPLETED, AnswerSight.ENGINE)
        assert record.ttft is not None
        assert record.ttft < 0.5 * record.total
        assert 0.7 * tokens < (record.output_tokens or 0) < 1.3 * tokens
        assert not any(load.in_flight for load in gateway.monitor.loads().values())


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_answer_that_is_shown_at_its_end_has_the_first_token_of_its_engine(
    tmp_path: Path, version: str
) -> None:
    """Body mode BUFFERED: the first token is told by the engine, tokens and usage by the body."""
    async with (
        engines(1) as servers,
        running({"only": engine_pool(*servers)}, ROUTES, pick={"listen": "127.0.0.1:0"}) as gateway,
        aiohttp.ClientSession() as session,
    ):
        assert gateway.picker is not None
        urls = [server.url for server in servers]
        config = unseen(gateway.picker.url, urls, duplex=False, mode="BUFFERED")
        async with running_envoy(tmp_path, version, config) as url:
            await eventually(lambda: all(load.scraped_at > 0 for load in gateway.monitor.loads().values()))
            status, answer = await ask(session, url, {**chat("hello"), "max_tokens": 300})
            assert (status, answer.endswith(b"data: [DONE]\n\n")) == (200, True)
            await eventually(lambda: gateway.recorder.live == 0)
        (record,) = gateway.recorder.recent
        assert (record.end, record.sight) == (RequestOutcome.COMPLETED, AnswerSight.ENGINE)
        assert record.ttft is not None
        assert record.ttft < 0.5 * record.total
        assert abs((record.output_tokens or 0) - (answer.count(b"data: ") - 2)) <= 1  # the role, and [DONE]
