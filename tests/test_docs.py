"""The documentation is consistent with the code: configurations load, code compiles, links resolve, limits agree.

The comment above a ```yaml block states how to load the block:
- `<!-- check: alone -->`: a whole configuration;
- `<!-- check: fleet -->`: the pools under all other blocks of the page;
- `<!-- check: with fleet -->`: a part, complete once merged over the page's fleet;
- `<!-- check: values -->`: values of the Helm chart, whose `config` is a whole configuration.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import yaml

from gateway import app, runtime, strict_json
from gateway.cli.main import main
from gateway.config.loading import load
from gateway.config.models import Config, Defaults, Key, ServerSection
from gateway.config.pool_section import PoolSection
from gateway.config.schema import schema
from gateway.config.yaml_source import preset
from gateway.downstream import http_server, limits
from gateway.fleet import endpoint_poll
from gateway.observe import logs, recorder
from gateway.observe.metrics.metric_table import CATALOG
from gateway.observe.otel import telemetry
from gateway.part_list import CONFIG
from gateway.upstream import answer
from gateway.upstream.routed_request import WHOLE_ANSWER
from lab.commands import add_commands
from policies.attempts.candidate_walk import MAX_DEATHS
from policies.fleet import circuit_breaker
from policies.fleet.endpoint_state import MAX_API_EJECTION
from policies.queue import queue_scheduler
from policies.rate_limit import endpoint_limits
from policies.routes.route import Route, Workload
from policies.routing import decide
from scripts import configuration_page, metrics_page, record_page
from tests.support.gateways import document, pool

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
ENVIRON = {"OPENAI_API_KEY": "sk-test", "ANTHROPIC_API_KEY": "sk-ant-test"}
_BLOCK = re.compile(r"(?:<!-- check: ([a-z ]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FILE = re.compile(r"`((?:backends|benchmarks|deploy|docs|gateway|lab|policies|scripts|tests)/[\w./-]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block; `mark` is the text of the check comment above the block."""

    page: Path
    line: int
    mark: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page) if block.language == language]


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for match in _BLOCK.finditer(text):
        yield Block(page, text.count("\n", 0, match.start(2)) + 1, match[1] or "", match[2], match[3])


def fleet_of(page: Path) -> Block:
    return next(block for block in blocks_of(page) if block.mark == "fleet")


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_every_configuration_block_loads(block: Block, tmp_path: Path) -> None:
    """A copied block gives a gateway that starts."""
    assert block.mark in ("alone", "fleet", "with fleet", "values"), (
        f"{block}: state how to load the block: <!-- check: alone -->"
    )
    files = {
        "alone": [block.text],
        "values": [yaml.safe_dump(yaml.safe_load(block.text).get("config"))],
        "fleet": [block.text, f"passthrough: {re.findall(r'^  ([a-z]+):', block.text, re.MULTILINE)[0]}"],
        "with fleet": [fleet_of(block.page).text if block.mark == "with fleet" else "", block.text],
    }
    paths = []
    for i, text in enumerate(files[block.mark]):
        paths.append(tmp_path / f"{i}.yaml")
        paths[-1].write_text(text, "utf-8")
    assert load(paths, ENVIRON).pools


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_every_python_block_compiles(block: Block) -> None:
    """Python blocks are valid syntax for the oldest supported Python."""
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_internal_link_resolves(page: Path) -> None:
    """A relative link names an existing file and, after `#`, a heading of the file."""
    for link in _LINK.findall(page.read_text("utf-8")):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}, which does not exist"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """A path between backticks exists in this repository."""
    assert [name for name in _FILE.findall(page.read_text("utf-8")) if not (ROOT / name).exists()] == []


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub generates for the headings of a page."""
    headings = _HEADING.findall(_BLOCK.sub("", page.read_text("utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_decision_has_a_number_of_its_own() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [number for number, times in Counter(page.name[:4] for page in pages).items() if times > 1] == []
    assert all(page.read_text().startswith(f"# {page.name[:4]}. ") for page in pages[1:])  # the template is the first


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")), ids=lambda page: page.stem)
def test_every_decision_begins_with_two_lines_in_short(page: Path) -> None:
    """What was decided and what it costs, below title, status and date, for a reader who reads no further."""
    title, status, decision, context, *_ = page.read_text("utf-8").split("\n\n")
    assert title.startswith("# ")
    assert status.startswith("Status: ")
    assert (decision.startswith("In short: "), len(decision.splitlines())) == (True, 2)
    assert context.startswith("## Context")


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")), ids=lambda page: page.stem)
def test_a_decision_is_a_page(page: Path) -> None:
    """600 words at most; its figures are in benchmarks/MEASURED.md."""
    assert len(page.read_text("utf-8").split()) <= 600


CITED = re.compile(r"(?:decisions/|[Dd]ecisions? (?:record )?)(\d{4})")
CITING = (
    "README.md",
    "CHANGELOG.md",
    "docs",
    "benchmarks",
    "backends",
    "deploy",
    "gateway",
    "lab",
    "policies",
    "scripts",
)


def texts() -> Iterator[Path]:
    """Pages, sources and deployed files that may cite a decision."""
    for name in CITING:
        kinds = (".md", ".py", ".yml", ".yaml", ".tpl")
        yield from (path for path in sorted([ROOT / name, *(ROOT / name).rglob("*")]) if path.suffix in kinds)


def test_every_cited_decision_is_there() -> None:
    """A record that is replaced leaves, and whoever cited it cites the one that holds the rule now."""
    known = {page.name[:4] for page in (ROOT / "docs" / "decisions").glob("[0-9]*.md")}
    cited = {
        (str(path.relative_to(ROOT)), number) for path in texts() for number in CITED.findall(path.read_text("utf-8"))
    }
    assert len(cited) > 30
    assert {(path, number) for path, number in cited if number not in known} == set()


def test_the_configuration_reference_is_generated_from_the_schema() -> None:
    """`python scripts/configuration_page.py` writes the page."""
    assert (ROOT / "docs/configuration.md").read_text("utf-8") == configuration_page.page()


def test_the_configuration_reference_has_every_key() -> None:
    """All keys of the schema, those of inner mappings included."""
    page = (ROOT / "docs/configuration.md").read_text("utf-8")
    named = re.findall(r"^(?:\| |## )`([\w.\[\]]+)`", page, re.MULTILINE)
    rows = {part for path in named for part in path.replace("[]", "").split(".")}
    document = schema(CONFIG)
    models = [document, *document["$defs"].values()]
    options = [option for model in models for option in model.get("anyOf", [model])]
    keys = {key for option in options for key in option.get("properties", {})}
    assert keys - rows == set()


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("server", ServerSection.model_fields.keys()),
        ("pools.NAME", PoolSection.model_fields.keys()),
        ("routes.NAME", Route.model_fields.keys() - {"name"}),  # the key in the file
        ("defaults", Defaults.model_fields.keys()),
        ("keys[]", Key.model_fields.keys()),
    ],
)
def test_a_table_of_keys_has_the_keys_of_its_section(section: str, fields: set[str]) -> None:
    """All, and no others; those of inner mappings have a dot."""
    page = (ROOT / "docs/configuration.md").read_text("utf-8")
    table = page.partition(f"## `{section}`\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == fields


def test_the_workload_table_agrees_with_the_presets() -> None:
    """docs/policies.md repeats policies/presets/, so both have to agree."""
    page = (ROOT / "docs/policies.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)`[^|]*\|" + r" ([^|]+) \|" * 6, page, re.MULTILINE)
    workloads = get_args(Workload)
    assert {row[0]: row[1:] for row in rows if row[0] in workloads} == {name: as_row(name) for name in workloads}


def as_row(workload: Workload) -> tuple[str, ...]:
    usual = preset(workload)
    budgets = (usual[name]["budget"] if name in usual else "-" for name in ("ttft", "tpot", "total"))
    hedge = usual["hedge"] if isinstance(usual["hedge"], str) else usual["hedge"]["max_extra"]
    return (*budgets, hedge, usual["on_miss"], usual["prefer"])


def test_the_metrics_page_is_generated_from_the_metric_table() -> None:
    """`python scripts/metrics_page.py` writes the page."""
    assert (ROOT / "docs/metrics.md").read_text("utf-8") == metrics_page.page()


def test_the_page_of_records_is_generated_from_their_columns() -> None:
    """`python scripts/record_page.py` writes the page."""
    assert (ROOT / "docs/record.md").read_text("utf-8") == record_page.page()


METRIC = r"(?:firsttoken|llm_d_epp)_\w+"


def test_every_metric_has_a_definition_row_and_an_action_row() -> None:
    """A definition row and an action row per metric; no unknown metric is named."""
    page = (ROOT / "docs/metrics.md").read_text("utf-8")
    rows = Counter(re.findall(rf"^\| `({METRIC})`", page.partition("## Buckets")[0], re.MULTILINE))
    assert rows == dict.fromkeys(CATALOG, 2)
    named = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(METRIC, page)}
    assert named == CATALOG.keys()


def test_every_make_target_that_the_pages_name_exists() -> None:
    """`make demo` in a page is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text("utf-8"), re.M)}
    assert named - targets == set()


def test_the_page_of_commands_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """No unknown command is listed."""
    page = (ROOT / "docs/commands.md").read_text("utf-8")
    main(["--help"], [add_commands])
    known = re.findall(r"^    ([a-z]+)(?: |$)", capsys.readouterr().out, re.MULTILINE)
    assert set(re.findall(r"^\| `([a-z]+)[ `]", page, re.MULTILINE)) == set(known)


def test_the_page_of_ports_lists_every_path_of_both_ports() -> None:
    """No unknown path is listed."""
    page = (ROOT / "docs/ports.md").read_text("utf-8")
    gateway = app.Gateway(Config.model_validate(document({"only": pool("http://127.0.0.1:9")})))
    admin = {resource.canonical for resource in gateway.admin_app.router.resources()}
    gateway.core.estimator.close()
    assert set(re.findall(r"`(?:GET|POST|DELETE) (/[\w/{}]*)", page)) == {*gateway.proxy.methods, *admin}


TIMEOUTS = limits.DEFAULT_TIMEOUTS
LIMITS = [  # page, start of the line there, and the text of the limit
    ("ports", "| `GET /requests", f"{recorder.RECENT} are kept"),
    ("limits", "| time for a body to arrive", f"{TIMEOUTS.body:g} s"),
    ("limits", "| time for a request's head", f"{TIMEOUTS.head:g} s"),
    ("limits", "| head of a request", f"{limits.MAX_LINE // 1024} KiB"),
    ("limits", "| head of a request", f"{limits.MAX_HEADERS} headers"),
    ("limits", "| nesting of a body", f"{strict_json.MAX_DEPTH} levels"),
    ("limits", "| caller that does not read", f"paused at {http_server.HIGH_WATER // 1024} KiB"),
    ("limits", "| caller that does not read", f"cut after {answer.STALL:g} s"),
    ("limits", "| idle connection of a caller", f"{TIMEOUTS.idle:g} s"),
    ("limits", "| idle connection to an endpoint", f"{runtime.IDLE:g} s"),
    ("limits", "| `retry-after` of a shed request", f"{decide.SHORTEST_WAIT:g} to {decide.LONGEST_WAIT:g} s"),
    ("limits", "| queued requests", f"| {queue_scheduler.MAX_HELD}; beyond"),
    ("limits", "| endpoints that may die of one request", f"| {MAX_DEATHS} |"),
    ("limits", "| silence before an answer that is not streamed", f"{WHOLE_ANSWER:g} s"),
    (
        "limits",
        "| endpoint taken out",
        f"after {circuit_breaker.FAILURES} failures in a row, or {circuit_breaker.REFUSALS} where nobody",
    ),
    (
        "limits",
        "| endpoint taken out",
        f"{circuit_breaker.EJECTION:g} s, then twice as long each time, up to {circuit_breaker.MAX_EJECTION:g} s",
    ),
    ("limits", "| endpoint taken out", f"(APIs: {MAX_API_EJECTION:g} s)"),
    (
        "limits",
        "| endpoint that limits us",
        f"{endpoint_limits.MIN_RETRY_AFTER:g} to {endpoint_limits.MAX_RETRY_AFTER:g} s;"
        f" {endpoint_limits.DEFAULT_RETRY_AFTER:g} s",
    ),
    ("limits", "| look at an engine's load", f"{endpoint_poll.PROBE_TIMEOUT:g} s to answer"),
    ("seeing", "Access log: ", f"{logs.QUEUE:,} lines"),
    ("seeing", "A collector that is gone", f"Up to {telemetry.QUEUE:,} spans wait"),
    ("seeing", "At shutdown the rest has", f"{telemetry.CLOSE_TIMEOUT:g} s to be exported"),
]


@pytest.mark.parametrize(("name", "row", "stated"), LIMITS)
def test_a_page_states_the_limits_of_the_code(name: str, row: str, stated: str) -> None:
    """A changed constant requires a change of the page."""
    page = (ROOT / f"docs/{name}.md").read_text("utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith(row)]
    assert stated in line


# Pages that a command writes, from code or from results.
WRITTEN = (
    *("docs/agents.md", "docs/clients.md", "docs/configuration.md", "docs/metrics.md", "docs/record.md"),
    *("docs/reliability.md", "benchmarks/ABLATION.md", "benchmarks/CAPACITY.md", "benchmarks/CLOSED_LOOP.md"),
    *("benchmarks/PICKER.md", "benchmarks/REPLAY.md", "benchmarks/RESULTS.md", "benchmarks/ROUTING.md"),
)
BY_HAND = [page for page in PAGES if str(page.relative_to(ROOT)) not in WRITTEN]
PAGE_BYTES, WORDS, WORDS_IN_ALL = 16 * 1024, 64_000, 93_500
BYTES = {ROOT / "README.md": 9 * 1024, ROOT / "CHANGELOG.md": 20 * 1024}  # a changelog shrinks at a release


@pytest.mark.parametrize("page", BY_HAND, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_read_in_ten_minutes(page: Path) -> None:
    """16 KB at most, and the README 9 KB; a longer page becomes two, or says each fact once."""
    assert len(page.read_bytes()) <= BYTES.get(page, PAGE_BYTES)


def test_the_pages_grow_no_further() -> None:
    """Words of the pages that people write, and of all Markdown of the tree: who adds a fact takes another one out."""
    known = [
        page
        for top in ("backends", "deploy", "gateway", "lab", "policies", "scripts", "tests")
        for page in (ROOT / top).rglob("*.md")
    ]
    written = sum(len(page.read_text("utf-8").split()) for page in [*BY_HAND, *known])
    in_all = written + sum(len((ROOT / name).read_text("utf-8").split()) for name in WRITTEN)
    assert (written <= WORDS, in_all <= WORDS_IN_ALL) == (True, True), f"{written} words by hand, {in_all} in all"


def test_every_page_of_docs_is_in_the_order_of_reading() -> None:
    """The README, or a page that the README names, links to each."""
    named = {ROOT / "README.md"}
    for page in [ROOT / "README.md", *[(ROOT / link).resolve() for link in links(ROOT / "README.md")]]:
        if page.suffix == ".md":
            named |= {page, *((page.parent / link).resolve() for link in links(page))}
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page not in named] == []


def links(page: Path) -> list[str]:
    """Relative links of a page, without anchors."""
    return [link.partition("#")[0] for link in _LINK.findall(page.read_text("utf-8")) if "://" not in link]
