"""`firsttoken facts`: sources of facts, and files that replace those of the release."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from backends.facts import refreshed
from backends.facts.fact_rows import APIS, MODELS, is_refreshed, read_on, shipped
from gateway.cli.facts_command import RELOAD
from gateway.cli.main import main
from tests.backends.facts.test_refreshed import newer

POOLS = """
state: {{dir: {state}}}
pools:
  ours: {{backend: azure, base_url: "https://our.openai.azure.com", api_key: key-0123456789, model: prod,
          accepts: {{like: gpt-6.1-sol, temperature: yes, tools: any}}}}
routes: {{chat: {{tiers: [ours], ttft: off}}}}
"""

PRICED = """
pools:
  own: {backend: vllm, model: gpt-6.1-sol, endpoints: ["http://127.0.0.1:9"]}
  known: {backend: openai, model: gpt-6.1-sol, api_key: key-0123456789abcdef}
  given: {backend: openai, model: gpt-6.1-sol, api_key: key-0123456789abcdef, price: {input: 1}}
  open: {backend: openai, api_key: key-0123456789abcdef}
routes: {chat: {tiers: [own, known, given], ttft: off}}
passthrough: open
"""


@pytest.fixture(autouse=True)
def shipped_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a month ago, so that there may be newer ones."""
    monkeypatch.setattr(refreshed, "_today", lambda: shipped(MODELS)["read"] + timedelta(30))
    yield
    refreshed.use({})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "f.yaml"
    path.write_text(POOLS.format(state=tmp_path / "state"))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["facts", *map(str, arguments)], [])
    said = capsys.readouterr()
    return code, said.out + said.err


def row(text: str, fact: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(fact + " "))


def test_each_fact_is_told_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the model's maker, where no pool is named."""
    code, text = run(capsys, "show", "openai/gpt-6.1-sol")
    assert (code, text.splitlines()[0]) == (0, "openai/gpt-6.1-sol at openai")
    assert row(text, "tools").split()[1:3] == ["responses", "shipped"]
    assert row(text, "tools").endswith("openai gpt-{v}-sol since 6.1 (S)")
    assert row(text, "most_tools").endswith(": openai")
    assert "otherwise 4" in row(text, "first token, s")
    assert "shutdown" in text.splitlines()[-1]


def test_the_price_is_told_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    """Of long prompts and of later days too, on lines of their own. Without one it is among what is not known."""
    _, text = run(capsys, "show", "gpt-6.1-sol")
    assert " input 2, cached_input 0.1, cache_write 2.5, output 10 (USD per million)" in row(text, "price")
    assert row(text, "price").endswith(f"shipped {read_on(MODELS)}: openai gpt-{{v}}-sol since 6.1 (T)")
    assert " input 4, " in row(text, "price from 272001 prompt tokens")
    _, text = run(capsys, "show", "gpt-6.9-sol")
    assert text.endswith(", price\n")


def test_the_price_of_a_pool_is_the_one_that_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As written, or of its model where its server is the API; an engine of the same name has none."""
    file = tmp_path / "g.yaml"
    file.write_text(PRICED)
    lines = {}
    for pool in ("own", "given", "known", "open"):
        _, text = run(capsys, "show", "gpt-6.1-sol", "--pool", pool, "--config", file)
        lines[pool] = [" ".join(line.split()) for line in text.splitlines() if line.startswith("price")]
    assert lines["own"] == []
    assert lines["given"] == ["price input 1, output 0 (USD per million) pool: price"]
    assert [line.split(" ")[2] for line in lines["known"]] == ["2,", "272001"]
    assert lines["open"] == ["price none: callers choose the model pool: write its price"]


def test_a_pool_has_facts_of_its_own(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that it states, and those of the model that it is like."""
    code, text = run(capsys, "show", "prod", "--pool", "ours", "--config", config)
    assert code == 0
    assert row(text, "tools").split()[1:] == ["any", "pool:", "accepts,", "reasoning"]
    assert row(text, "temperature").endswith("pool: accepts")
    assert "like gpt-6.1-sol, shipped" in row(text, "efforts")
    assert run(capsys, "show", "prod", "--pool", "our", "--config", config) == (
        2,
        "there is no pool 'our'; did you mean 'ours'?\n",
    )


def test_a_newer_file_is_kept_and_read(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Offline; what changed is told row by row, and the next command believes it."""
    source = tmp_path / "new.yaml"
    source.write_bytes(newer())
    digest = "sha256:" + hashlib.sha256(source.read_bytes()).hexdigest()
    code, text = run(capsys, "update", "--from", source, "--digest", digest, "--config", config)
    assert (code, text.splitlines()[1:]) == (0, ["added: openai gpt-{v}-vega since 7", RELOAD])
    assert (tmp_path / "state" / "facts-models.yaml").read_bytes() == source.read_bytes()
    _, shown = run(capsys, "show", "gpt-7-vega", "--config", config)
    assert "refreshed 2026-" in row(shown, "efforts")
    assert [is_refreshed(file) for file in (MODELS, APIS)] == [True, False]
    code, text = run(capsys, "update", "--from", source, "--config", config)
    assert (code, "not after the models.yaml in use" in text) == (2, True)


@pytest.mark.parametrize(
    ("text", "digest", "words"),
    [
        (newer(), "sha256:" + "0" * 64, "its digest is sha256:"),
        (newer(days=-1), None, "not after the models.yaml in use"),
        (newer(families={"a": [{"match": "m", "source": "S", "size": "big"}]}), None, "a m: Expected `float"),
        (newer(days=9, families={}), None, "is missing"),
        (b"<html>", None, "no file of facts"),
    ],
)
def test_a_bad_file_changes_nothing(
    text: bytes, digest: str | None, words: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What there is is kept: the shipped rows, or those of an earlier update."""
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_bytes(newer(days=2))
    bad.write_bytes(text)
    assert run(capsys, "update", "--from", good, "--config", config)[0] == 0
    code, said = run(
        capsys, "update", "--from", bad, "--config", config, *(["--digest", digest] if digest is not None else [])
    )
    assert (code, words in said) == (2, True), said
    assert (tmp_path / "state" / "facts-models.yaml").read_bytes() == good.read_bytes()
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["facts-models.yaml"]


def test_what_is_missing_is_named(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A digest beside a URL, a place to write to, a file."""
    assert "a URL vouches for nothing" in run(capsys, "update", "--from", "https://h.invalid/m", "--config", config)[1]
    assert "add --config FILE" in run(capsys, "update", "--from", config)[1]
    assert "there is no such file" in run(capsys, "update", "--from", tmp_path / "no", "--config", config)[1]
    assert "add --config FILE" in run(capsys, "show", "m", "--pool", "ours")[1]


@pytest.mark.parametrize("width", [40, 60, 80, 132])
def test_a_table_fits_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No word is lost; into a file or a pipe each fact is one line."""
    _, whole = run(capsys, "show", "gpt-6.1-sol")
    assert max(map(len, whole.splitlines())) > 300
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    _, text = run(capsys, "show", "gpt-6.1-sol")
    assert max(map(len, text.splitlines())) <= max(width, 60)
    assert sorted("".join(text.split())) == sorted("".join(whole.split()))
