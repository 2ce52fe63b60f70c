"""When files are read again, and what a reload leaves of the one before."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gateway.config.config_errors import ConfigError
from gateway.config.models import Config
from gateway.reload import ConfigSource, Reloader
from tests.support.gateways import document, pool, running
from tests.support.upstream import Upstream

ONE = Config.model_validate(document({"only": pool("http://127.0.0.1:9")}))
OTHER = Config.model_validate(document({"other": pool("http://127.0.0.1:9")}))


def test_a_file_is_read_when_two_looks_find_the_same_news(tmp_path: Path) -> None:
    """The first may have found half of it. What was tried is not tried again."""
    file = tmp_path / "f.yaml"
    file.write_text("a")
    source = ConfigSource(lambda: ONE, [file])
    assert not source.files_changed()
    file.write_text("ab")
    assert not source.files_changed()
    file.write_text("abc")
    assert not source.files_changed()
    assert source.files_changed()
    source.next(ONE)
    assert not source.files_changed()


def test_a_file_that_is_replaced_or_goes_is_news_too(tmp_path: Path) -> None:
    """Also one of the same size and time, behind a link."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (1, 1))
    link = tmp_path / "link"
    link.symlink_to("one")
    source = ConfigSource(lambda: ONE, [link])
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", link)
    assert [source.files_changed(), source.files_changed()] == [False, True]
    source.next(ONE)
    link.unlink()
    assert [source.files_changed(), source.files_changed()] == [False, True]


def test_a_tokenizer_that_cannot_be_had_is_found_before_anything_is_touched(tmp_path: Path) -> None:
    bad = tmp_path / "tokenizer.json"
    bad.write_text("{}")
    wanted = Config.model_validate(document({"only": pool("http://127.0.0.1:9", tokenizer=str(bad))}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ConfigSource(lambda: wanted).next(ONE)


async def test_reloads_come_one_after_the_other() -> None:
    """Whoever asks during one gets the next, and the last to ask has the last word."""
    taken: list[Config] = []
    configs = [OTHER, ONE]

    async def take(config: Config) -> None:
        await asyncio.sleep(0.01)
        taken.append(config)

    reloader = Reloader(ONE, ConfigSource(lambda: configs.pop(0)), take)
    first, second = await asyncio.gather(reloader.reload("a"), reloader.reload("b"))
    assert ([*taken[0].pools], [*taken[1].pools]) == (["other"], ["only"])
    assert {*first.changed} == {*second.changed} == {"pools.only", "pools.other", "routes.chat.tiers"}


async def test_who_was_let_go_is_sent_before_the_fleet_changes() -> None:
    """Its decision names endpoints of the fleet of now."""
    async with Upstream([]) as upstream, running({"only": pool(upstream.url)}) as gateway:
        before, gateway.queue.dispatch_pending = gateway.runtime.current, True
        taking = asyncio.create_task(gateway.apply_config(OTHER))
        await asyncio.sleep(0.05)
        assert gateway.runtime.current is before
        gateway.queue.dispatch_pending = False
        await taking
        assert [*gateway.decider.fleet.snapshot(0.0).pools] == ["other"]
