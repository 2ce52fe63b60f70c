"""`firsttoken export`: files for programs beside a gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cli import export
from gateway.cli.arguments import EXPORTS
from gateway.cli.main import main

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", EXPORTS)
def test_files_are_those_of_the_repository(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is named on standard output; the folder is made."""
    folder = tmp_path / "new/folder"
    assert main(["export", kind, str(folder)], ()) == 0
    written = sorted(folder.iterdir())
    assert written
    assert {path.name: path.read_bytes() for path in written} == {
        path.name: path.read_bytes() for path in ROOT.glob(EXPORTS[kind])
    }
    assert capsys.readouterr().out.splitlines() == list(map(str, written))
    assert main(["export", kind, str(folder)], ()) == 0  # again: nothing changes


def test_a_changed_file_is_kept_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing at all is written where one file differs."""
    changed = tmp_path / "slo.yml"
    changed.write_text("groups: []\n")
    assert main(["export", "rules", str(tmp_path)], ()) == 2
    assert capsys.readouterr().err == f"{changed}: exists with another content; --force writes over it\n"
    assert [path.name for path in tmp_path.iterdir()] == ["slo.yml"]
    assert changed.read_text() == "groups: []\n"
    assert main(["export", "rules", str(tmp_path), "--force"], ()) == 0
    assert changed.read_bytes() == (ROOT / "deploy/helm/firsttoken/files/rules/slo.yml").read_bytes()


@pytest.mark.parametrize("made", ["a file", "a folder of the name of a file"])
def test_a_folder_that_cannot_be_written_is_exit_code_2(
    made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line that names the path."""
    at = tmp_path / "out"
    if made == "a file":
        at.write_text("")
    else:
        (at / "haproxy.cfg").mkdir(parents=True)
    assert main(["export", "haproxy", str(at)], ()) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), err.startswith(str(at))) == (1, True)


def test_an_installation_without_the_files_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a wheel built by other means would be."""
    monkeypatch.setattr(export, "ROOTS", (tmp_path,))
    assert main(["export", "nginx", str(tmp_path)], ()) == 2
    assert capsys.readouterr().err == "deploy/nginx/*.conf: missing in this installation\n"
