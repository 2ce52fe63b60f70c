"""scripts/prometheus_setup.py: what it finds, and what it says where there is nothing to be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import prometheus_setup


def program(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def nothing_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither on PATH, where there is no apt either, nor in the cache."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(prometheus_setup, "FOLDER", tmp_path / "cache" / "prometheus")
    (tmp_path / "cache").mkdir()


def test_what_is_installed_is_taken_before_what_was_fetched(tmp_path: Path) -> None:
    """Both programs from one place: they are of one version."""
    fetched = {name: program(prometheus_setup.FOLDER / "usr/bin", name) for name in prometheus_setup.NAMES}
    program(tmp_path / "bin", "prometheus")
    assert prometheus_setup.found() == fetched
    program(tmp_path / "bin", "promtool")
    assert prometheus_setup.found() == {name: tmp_path / "bin" / name for name in prometheus_setup.NAMES}


def test_without_apt_it_says_so_and_fails_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """`make test` goes on: the tests that need it are skipped."""
    assert prometheus_setup.main() == 0
    assert "apt-get" in capsys.readouterr().err
    assert prometheus_setup.found() is None


def test_what_apt_says_last_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing half done is left behind."""
    program(tmp_path / "bin", "apt-get").write_text("#!/bin/sh\necho 'E: no such package' >&2\nexit 100\n")
    assert prometheus_setup.main() == 0
    assert "E: no such package" in capsys.readouterr().err
    assert list((tmp_path / "cache").iterdir()) == []
