"""Detection of changed files, and the order of reloads."""

from __future__ import annotations

import asyncio
import os
from datetime import date, timedelta
from pathlib import Path

import pytest

from backends.facts import refreshed
from backends.facts.fact_rows import MODELS
from gateway import reload
from gateway.config import pool_section
from gateway.config.config_errors import ConfigError
from gateway.config.kept_facts import use_kept
from gateway.config.models import Config
from gateway.files import CHECK_INTERVAL
from gateway.reload import ConfigSource, Reloader
from tests.backends.facts.test_refreshed import newer
from tests.support.gateways import document, pool, running
from tests.support.upstream import Upstream

pytestmark = pytest.mark.virtual_time

ONE = Config.model_validate(document({"only": pool("http://127.0.0.1:9")}))
OTHER = Config.model_validate(document({"other": pool("http://127.0.0.1:9")}))


def test_a_changed_file_is_read_after_two_equal_polls(tmp_path: Path) -> None:
    """The first poll may have found half a file. A tried version is not tried again."""
    file = tmp_path / "f.yaml"
    file.write_text("a")
    source = ConfigSource(lambda: ONE, [file])
    assert not source.watch.changed()
    file.write_text("ab")
    assert not source.watch.changed()
    file.write_text("abc")
    assert not source.watch.changed()
    assert source.watch.changed()
    source.next(ONE)
    assert not source.watch.changed()


def test_a_replaced_or_removed_file_is_a_change(tmp_path: Path) -> None:
    """Even with equal size and time, behind a symbolic link."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (1, 1))
    link = tmp_path / "link"
    link.symlink_to("one")
    source = ConfigSource(lambda: ONE, [link])
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", link)
    assert [source.watch.changed(), source.watch.changed()] == [False, True]
    source.next(ONE)
    link.unlink()
    assert [source.watch.changed(), source.watch.changed()] == [False, True]


def test_an_unusable_tokenizer_is_found_before_the_reload(tmp_path: Path) -> None:
    bad = tmp_path / "tokenizer.json"
    bad.write_text("{}")
    wanted = Config.model_validate(document({"only": pool("http://127.0.0.1:9", tokenizer=str(bad))}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ConfigSource(lambda: wanted).next(ONE)


async def test_reloads_are_sequential() -> None:
    """A request during a reload gets the next reload, and the last request wins."""
    applied: list[Config] = []
    configs = [OTHER, ONE]

    async def apply(config: Config) -> None:
        await asyncio.sleep(0.01)
        applied.append(config)

    reloader = Reloader(ONE, ConfigSource(lambda: configs.pop(0)), apply)
    first, second = await asyncio.gather(reloader.reload("a"), reloader.reload("b"))
    assert ([*applied[0].pools], [*applied[1].pools]) == (["other"], ["only"])
    assert {*first.changed} == {*second.changed} == {"pools.only", "pools.other", "routes.chat.tiers"}


async def test_a_day_of_another_price_is_a_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, though the file is the same. A day without one is none."""
    file, days, applied = tmp_path / "f.yaml", [date(2026, 12, 30)], list[float]()
    file.write_text("a")
    for module in (reload, pool_section):
        monkeypatch.setattr(module, "today", lambda: days[-1])
    api = {"backend": "gemini", "model": "gemini-3.8-flash", "api_key": "sk-0123456789abcdef"}

    def load() -> Config:
        return Config.model_validate({"pools": {"api": api}, "passthrough": "api"})

    async def apply(config: Config) -> None:
        applied.append(config.fleet()[0].price.input)

    reloader = Reloader(load(), ConfigSource(load, [file]), apply)
    reloader.start()
    for day, known in ((31, []), (32, [1.5]), (33, [1.5])):
        days.append(date(2026, 12, 1) + timedelta(day - 1))
        await asyncio.sleep(3 * CHECK_INTERVAL)
        assert applied == known
    await reloader.close()


async def test_newer_facts_hold_after_a_reload_of_the_same_configuration(tmp_path: Path) -> None:
    """Of a model that was asked before, too: what a body is made to fit is that of the new rows."""
    pools = {"only": pool("http://127.0.0.1:9", backend="openai", model="gpt-7-vega")}

    def load() -> Config:
        use_kept(tmp_path)
        return Config.model_validate(document(pools))

    async with running(pools) as gateway:
        runtime = gateway.runtime
        reloader = Reloader(runtime.current.config, ConfigSource(load), gateway.apply_config)
        before = runtime.current.servers().facts("only").efforts
        refreshed.path_of(tmp_path, MODELS).write_bytes(newer())
        try:
            found = await reloader.reload("test")
            efforts = runtime.current.servers().facts("only").efforts
            again = await reloader.reload("test")
        finally:
            use_kept(None)
        assert efforts == ("low",) != before
        assert (found.changed, again.changed) == (("facts",), ())


async def test_released_requests_are_dispatched_before_the_fleet_changes() -> None:
    """Their decisions name endpoints of the current fleet."""
    async with Upstream([]) as upstream, running({"only": pool(upstream.url)}) as gateway:
        before, gateway.queue.dispatch_pending = gateway.runtime.current, True
        applying = asyncio.create_task(gateway.apply_config(OTHER))
        await asyncio.sleep(0.05)
        assert gateway.runtime.current is before
        gateway.queue.dispatch_pending = False
        await applying
        assert [*gateway.decider.fleet.snapshot(0.0).pools] == ["other"]
