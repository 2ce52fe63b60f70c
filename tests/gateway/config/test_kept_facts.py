"""Fact files of `state.dir`: whatever stands there, a start does not fail, and the reason is told."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from backends.facts.fact_checks import LARGEST
from backends.facts.fact_rows import APIS, MODELS, is_refreshed, shipped
from backends.facts.refreshed import path_of
from gateway.cli.main import main
from gateway.config.kept_facts import left_files, use_kept
from tests.backends.facts.test_refreshed import newer

FILE = """
state: {{dir: {state}}}
pools:
  api: {{backend: openai, api_key: key-0123456789, model: prod,
         accepts: {{like: gpt-6.1-sol, strict_schema: moonshot, tool_name: "[a-z]+"}}}}
routes: {{chat: {{tiers: [api], ttft: off}}}}
"""


@pytest.fixture(autouse=True)
def shipped_rows() -> Iterator[None]:
    yield
    use_kept(None)


def folder(path: Path) -> None:
    path.mkdir()


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, LARGEST + 1)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def with_a_time(path: Path) -> None:
    path.write_bytes(newer(read=datetime(2026, 11, 30, 12)))


def without_rows(path: Path) -> None:
    path.write_bytes(newer(families={}))


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (os.mkfifo, "not a regular file"),
    (folder, "Is a directory"),
    (endless, "not a regular file"),
    (large, "longer than 4 MB"),
    (with_a_time, "a day is written YYYY-MM-DD"),
    (without_rows, "is missing"),
]


@pytest.mark.parametrize(("put", "words"), BROKEN, ids=[put.__name__ for put, _ in BROKEN])
def test_a_file_that_cannot_be_used_leaves_the_shipped_rows(
    put: Callable[[Path], None], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, with a line of the log."""
    put(path_of(tmp_path, MODELS))
    with caplog.at_level(logging.WARNING, "firsttoken"):
        use_kept(tmp_path)
    (line,) = left_files()
    assert line.startswith(f"the shipped facts hold: {path_of(tmp_path, MODELS)}: ")
    assert words in line
    assert [record.getMessage() for record in caplog.records] == [line]
    assert not is_refreshed(MODELS)
    use_kept(None)
    assert left_files() == ()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read each file")
def test_a_file_that_may_not_be_read_leaves_the_shipped_rows(tmp_path: Path) -> None:
    path_of(tmp_path, MODELS).write_bytes(newer())
    path_of(tmp_path, MODELS).chmod(0)
    use_kept(tmp_path)
    assert "Permission denied" in left_files()[0]


def test_an_older_file_is_told_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after each upgrade."""
    path_of(tmp_path, MODELS).write_bytes(newer(days=-1))
    with caplog.at_level(logging.INFO, "firsttoken"):
        use_kept(tmp_path)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "not after the models.yaml of the release" in left_files()[0]


def test_check_and_facts_tell_a_file_that_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And hold the configuration for valid."""
    config = tmp_path / "f.yaml"
    config.write_text(FILE.format(state=tmp_path))
    path_of(tmp_path, MODELS).write_text("read: soon")
    for command in (["check", str(config)], ["facts", "show", "gpt-6.1-sol", "--config", str(config)]):
        assert main(command, []) == 0
        assert f"the shipped facts hold: {path_of(tmp_path, MODELS)}: no file of facts" in capsys.readouterr().out


def test_a_valid_configuration_stays_valid_with_newer_facts(tmp_path: Path) -> None:
    """Of a model that they do not have any more, too, whose facts are those of its API then."""
    config = tmp_path / "f.yaml"
    config.write_text(FILE.format(state=tmp_path))
    path_of(tmp_path, MODELS).write_bytes(newer(families={family: [] for family in shipped(MODELS)["families"]}))
    path_of(tmp_path, APIS).write_bytes(newer(APIS))
    assert main(["check", str(config)], []) == 0
    assert (is_refreshed(MODELS), is_refreshed(APIS), left_files()) == (True, True, ())


@pytest.mark.parametrize("wrong", ['tool_name: "["', "schema: nowhere", "ttft: {low: 0}", "stops: -1"])
def test_facts_of_a_pool_are_checked_as_those_of_rows(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value that a reader cannot use is refused by name."""
    config = tmp_path / "f.yaml"
    config.write_text(
        FILE.format(state=tmp_path).replace("like: gpt-6.1-sol", wrong, 1).replace(', tool_name: "[a-z]+"', "")
    )
    assert main(["check", str(config)], []) == 2
    assert f"accepts.{wrong.partition(':')[0]}: " in capsys.readouterr().err
