"""scripts/prometheus_setup.py: discovery of the programs, and messages if there are none."""

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
def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Provides an empty PATH, without apt, and an empty cache."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(prometheus_setup, "FOLDER", tmp_path / "cache" / "prometheus")
    (tmp_path / "cache").mkdir()


def test_installed_programs_are_preferred_to_downloads(tmp_path: Path) -> None:
    """Both programs come from the same place, and so have the same version."""
    fetched = {name: program(prometheus_setup.FOLDER / "usr/bin", name) for name in prometheus_setup.NAMES}
    program(tmp_path / "bin", "prometheus")
    assert prometheus_setup.found() == fetched
    program(tmp_path / "bin", "promtool")
    assert prometheus_setup.found() == {name: tmp_path / "bin" / name for name in prometheus_setup.NAMES}


def test_without_apt_the_setup_prints_a_message_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    """`make test` continues, without tests of Prometheus."""
    assert prometheus_setup.main() == 0
    assert "apt-get" in capsys.readouterr().err
    assert prometheus_setup.found() is None


def test_the_last_message_of_apt_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No partial download remains."""
    program(tmp_path / "bin", "apt-get").write_text("#!/bin/sh\necho 'E: no such package' >&2\nexit 100\n")
    assert prometheus_setup.main() == 0
    assert "E: no such package" in capsys.readouterr().err
    assert list((tmp_path / "cache").iterdir()) == []
