"""`firsttoken import`: output, files and hostile input."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cli.main import main
from tests.support.import_cases import CANARY, HELM, TEAM, deployment


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("litellm.yaml").write_text(TEAM)
    Path("values.yaml").write_text(HELM)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["import", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_yaml_goes_to_stdout_and_the_report_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "litellm", "litellm.yaml")
    assert code == 0
    assert out.startswith("# Written by `firsttoken import litellm`")
    assert "pools:\n  chat:\n    backend: vllm\n" in out
    assert "  model_list[*].litellm_params.api_base (3 keys) -> pools.*.endpoints\n" in err
    assert CANARY not in out + err


def test_the_yaml_goes_to_a_new_file_and_check_accepts_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, "production-stack", "values.yaml", "-o", "ours.yaml", "--release", "prod")
    assert (code, err, out.splitlines()[-1]) == (0, "", "written: ours.yaml")
    monkeypatch.setenv("VLLM_API_KEY", CANARY)
    assert main(["check", "ours.yaml"]) == 0


def test_an_existing_file_is_never_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    Path("ours.yaml").write_text("mine")
    code, out, err = run(capsys, "litellm", "litellm.yaml", "-o", "ours.yaml")
    assert (code, out, err) == (2, "", "ours.yaml: exists already; name another file, or move it away\n")
    assert Path("ours.yaml").read_text() == "mine"


def test_a_key_that_stands_twice_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The last one counts, as for LiteLLM."""
    Path("twice.yaml").write_text(deployment("model: gpt-4o") + "router_settings: {num_retries: 1,\n num_retries: 2}")
    code, out, err = run(capsys, "litellm", "twice.yaml")
    assert (code, err.splitlines()[-1]) == (0, "twice.yaml:4: a key that stands twice; the last one counts")
    assert "max_attempts: 3" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"model_list:\n  - {{api_key: {CANARY}", "bad.yaml:2: not YAML; correct this line first"),
        (f"model_list: [\n{CANARY}: ]:", "not YAML"),
        ("a: &a [*a]", "not a configuration of LiteLLM's proxy"),
        ("model_list: &a [*a]", "nested more than 100 levels"),
        ("[" * 50_000, "not YAML"),
        (
            "a0: &a0 [1,2,3,4,5,6,7,8,9]\n"
            + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
            + "model_list: []",
            "the file has more than 100000 keys",
        ),
        ("\x00", "not YAML"),
        ("model_list: !!python/object/apply:os.system [ls]", "not YAML"),
    ],
    ids=["cut", "syntax", "cycle", "deep-cycle", "nested", "bomb", "nul", "tag"],
)
def test_hostile_files_are_refused_in_words(capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    """Exit code 2, in bounded time, without a secret."""
    Path("bad.yaml").write_text(text)
    code, out, err = run(capsys, "litellm", "bad.yaml")
    assert (code, out, message in err, CANARY in err) == (2, "", True, False)


def test_a_format_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "nginx", "x")[0] == 2
    assert run(capsys, "litellm", "nowhere.yaml")[2] == "nowhere.yaml: cannot be read: No such file or directory\n"
