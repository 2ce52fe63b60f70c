import asyncio

import pytest

from backends.server_profiles import ApiProfile
from lab.engines.engine import Engine
from lab.engines.virtual_engine import HostedApi
from lab.servers.drivers import AnswerWriter, EngineDriver, Faults, HostedDriver
from tests.support.engine_builders import ask, quiet

pytestmark = pytest.mark.virtual_time


async def test_an_aborted_answer_gets_no_token_even_from_the_step_under_way():
    """The last token may be planned already; the caller is gone all the same."""
    engine = Engine(quiet())
    driver = EngineDriver(engine, Faults(), speed=1.0)
    gone, stays = AnswerWriter(1000, 0.0), AnswerWriter(1000, 0.0)
    driver.submit(ask("gone", 1000), gone)
    driver.submit(ask("stays", 1000), stays)
    while not engine.running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    driver.abort("gone")
    await stays.done.wait()
    await driver.close()
    assert (gone.tokens, stays.tokens) == (0, 1)


async def test_lateness_does_not_add_up():
    """If the loop wakes the engine late, 200 steps still take their planned time, in the engine's clock."""
    profile = quiet()
    driver = EngineDriver(Engine(profile), Faults(), speed=20.0, max_lateness=10.0)  # s: more than any test machine
    answer = AnswerWriter(10, 0.0)
    driver.submit(ask(1, 10, 201), answer)
    await answer.done.wait()
    await driver.close()
    took = sum(profile.duration_ms(1, 1, context=10 + i) for i in range(200)) * 1e-3
    assert answer.generation == pytest.approx(took)


async def test_an_aborted_answer_of_an_api_gets_no_token():
    """The other answer, which lasts far longer, gets all tokens."""
    driver = HostedDriver(HostedApi(ApiProfile("api", "mini")), Faults(), speed=100.0)
    gone, stays = AnswerWriter(10, 0.0), AnswerWriter(10, 0.0)
    driver.submit(ask("gone", 10, 50), gone)
    driver.submit(ask("stays", 10, 300), stays)
    driver.abort("gone")
    await stays.done.wait()
    assert (gone.tokens, stays.tokens) == (0, 300)
