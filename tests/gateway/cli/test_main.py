"""Output and exit codes of the commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from gateway.cli.arguments import AddCommand
from gateway.cli.main import PLUGINS, main
from gateway.config.schema import schema

ROOT = Path(__file__).parents[3]
GOOD = "pools: {p: {backend: vllm, model: m, endpoints: [http://a]}}\nroutes: {r: {tiers: [p]}}\n"
KEYS = [name for name in os.environ if name.endswith(("_API_KEY", "_BASE_URL"))]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*KEYS, "FIRSTTOKEN_DEBUG"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments, ())
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_check_prints_ok(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0, and a summary."""
    Path("f.yaml").write_text(GOOD)
    code, out, err = run(capsys, "check", "f.yaml")
    assert (code, out.splitlines()[0], err) == (0, "ok: 1 pool, 1 endpoint, 1 route", "")


def test_check_merges_files(capsys: pytest.CaptureFixture[str]) -> None:
    """As serve does."""
    for name, line in zip(("pools.yaml", "routes.yaml"), GOOD.splitlines(), strict=True):
        Path(name).write_text(line)
    assert run(capsys, "check", "pools.yaml", "routes.yaml")[0] == 0


def test_check_without_files_reads_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As serve does."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    code, out, _ = run(capsys, "check")
    assert (code, out.splitlines()[0]) == (0, "ok: 1 pool, 1 endpoint, 0 routes")


KNOWN = (
    "up, serve, pick, check, probe, explain, agents, keys, facts, top, why, drain, advise, records, import, schema, "
    "export"
)


@pytest.mark.parametrize("command", [("check",), ("serve", "--config")])
def test_a_wrong_configuration_is_exit_code_2(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    """Errors on standard error, a line each; no server is started."""
    Path("f.yaml").write_text(GOOD + "servr: {}\ndefaults: {connect: 2}\n")
    assert run(capsys, *command, "f.yaml") == (
        2,
        "",
        "f.yaml:3: servr: unknown key; did you mean 'server'?\n"
        "f.yaml:4: defaults.connect: 2 has no unit; write '2ms' or '2s'\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], f"name a command: {KNOWN} (see firsttoken --help)"),
        (["chekc"], "no command 'chekc'; did you mean 'check'? (see firsttoken --help)"),
        (["fly"], f"no command 'fly'; known: {KNOWN} (see firsttoken --help)"),
        (["serve", "--confg", "x"], "unrecognized arguments: --confg (see firsttoken --help)"),
        (
            ["serve", "--workers", "0"],
            "argument --workers: '0' is not a number of workers, 1 to 256 (see firsttoken serve --help)",
        ),
        (["serve", "--config"], "argument --config: expected at least one argument (see firsttoken serve --help)"),
    ],
)
def test_wrong_arguments_are_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """A single line that points to `--help`."""
    assert run(capsys, *arguments) == (2, "", f"firsttoken: {message}\n")


def test_schema_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """To be redirected into a file beside the YAML."""
    code, out, _ = run(capsys, "schema")
    assert (code, json.loads(out)) == (0, schema())


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """And exits with 0."""
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert [command for command in KNOWN.split(", ") if f"\n    {command} " not in out] == []


WITH_VALUE = re.compile(r"^  (-{1,2}[\w-]+) [A-Z[](.*?)(?=^  -|^\S|\Z)", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "command",
    [
        *([name] for name in KNOWN.split(", ") if name not in ("keys", "import")),
        *(["keys", action] for action in ("add", "revoke", "list")),
        *(["import", name] for name in ("litellm", "production-stack")),
    ],
    ids=" ".join,
)
def test_help_shows_the_default_of_every_option(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    """Of each that takes a value, or that it is required."""
    code, out, _ = run(capsys, *command, "--help")
    found = WITH_VALUE.findall(out.partition("options:")[2])
    assert (code, "SUPPRESS" in out) == (0, False)
    assert [option for option, text in found if "default" not in text and "(required)" not in text] == []


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`firsttoken schema | head -1`: no message, no traceback, exit code 0."""
    code = "import sys; from gateway.cli.main import main; sys.stdin.readline(); sys.exit(main(['schema']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()  # before anything is written
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stderr is not None
        assert (process.stderr.read(), process.wait(20)) == (b"", 0)


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Installed, or run from source."""
    code, out, _ = run(capsys, "--version")
    assert (code, out.startswith("firsttoken"), out.count("\n")) == (0, True, 1)


def test_an_internal_error_is_exit_code_1_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An internal error is never reported as the operator's; FIRSTTOKEN_DEBUG gives the traceback."""
    closed = StringIO()
    closed.close()
    with redirect_stdout(closed):
        assert main(["schema"]) == 1
        monkeypatch.setenv("FIRSTTOKEN_DEBUG", "1")
        with pytest.raises(ValueError, match="closed file"):
            main(["schema"])
    line = "ValueError: I/O operation on closed file"
    assert capsys.readouterr().err == f"firsttoken: internal error: {line} (our fault; please report)\n"


def test_starting_up_imports_no_server() -> None:
    """`check` and `--help` answer at once: modules of a command are imported when the command runs."""
    heavy = "{'aiohttp', 'pydantic', 'yaml', 'tiktoken', 'rich'} & set(sys.modules)"
    code = f"import sys, gateway.cli.main; print({heavy} or 'none')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "none\n"


PLUGIN = """
from argparse import Namespace

def add_commands(command):
    command("wave", "greet", "waving:wave").add_argument("--to", default="everyone")

def wave(args: Namespace) -> int:
    print("hello", args.to)
    return 3
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A distribution with a command of its own."""
    found = tmp_path / "waving-1.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: waving\nVersion: 1.0\n")
    (found / "entry_points.txt").write_text(f"[{PLUGINS}]\nwaving = waving:add_commands\n")
    (tmp_path / "waving.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("waving", None)


@pytest.mark.usefixtures("installed")
def test_an_installed_distribution_adds_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """To those of the gateway, in the help and among the names of an error."""
    assert main(["wave", "--to", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"
    assert main(["--help"]) == 0
    assert "\n    wave " in capsys.readouterr().out
    assert main(["wavv"]) == 2
    assert "did you mean 'wave'?" in capsys.readouterr().err


@pytest.mark.parametrize("function", ["gone:add", "tests.gateway.cli.test_main:add_a_known_command"])
def test_a_plugin_that_fails_takes_no_command_from_the_gateway(
    function: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It cannot be imported, or adds a command that the gateway has: one line names it."""
    found = tmp_path / "other-1.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (found / "entry_points.txt").write_text(f"[{PLUGINS}]\nother = {function}\n")
    monkeypatch.syspath_prepend(tmp_path)
    code = main(["--version"])
    captured = capsys.readouterr()
    assert (code, captured.out.startswith("firsttoken ")) == (0, True)
    assert captured.err.startswith(f"firsttoken: the plugin {function} adds no command: ")


def add_a_known_command(command: AddCommand) -> None:
    command("serve", "another one", "gone:serve")


@pytest.mark.usefixtures("installed")
def test_a_command_of_the_gateway_imports_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    """A gateway that serves needs nothing that is installed beside it, broken or not."""
    Path("waving.py").write_text("raise RuntimeError")
    assert main(["schema"]) == 0
    assert "waving" not in sys.modules
    assert main(["--help"]) == 0
    assert "the plugin waving:add_commands adds no command" in capsys.readouterr().err
