"""The JSON Schema agrees with the loader: both accept the same documents."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from gateway.config.schema import descriptions, keys_at, schema, words_at
from gateway.config.yaml_source import parse
from tests.support.contract import CONTRACT

ROOT = Path(__file__).parents[3]
SHIPPED = sorted([*ROOT.glob("policies/presets/*.yaml"), *ROOT.glob("deploy/config/*.yaml")])
SCHEMA = schema()


def errors(text: str) -> list[str]:
    """Paths of schema errors in a document. Variables stay unexpanded."""
    document = parse(text.replace("${", "$${"), "f", {})
    return [
        ".".join(map(str, error.absolute_path)) for error in Draft202012Validator(SCHEMA).iter_errors(document.data)
    ]


def test_the_schema_is_valid() -> None:
    """Valid under the declared JSON Schema draft."""
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_the_example_of_the_contract_is_valid() -> None:
    """All forms of the example."""
    assert errors(CONTRACT) == []


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_valid(file: Path) -> None:
    """Presets and the compose stack."""
    assert errors(file.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "routes: {r: {tiers: [p], hedge: off, ttft: off, rescue: on}}",
        "routes: {r: {tiers: [p], hedge: {max_extra: 0.03}}}",
        "routes: {r: {tiers: [p], escalate: [refusal, empty]}}",
        "defaults: {max_body: 1048576, connect: '${C:-2s}', max_attempts: '${N}'}",
        "server: {listen: '${LISTEN}', open: '${OPEN:-false}', workers: '${W:-1}'}",
        "telemetry: {access_log: off}",
        "telemetry: {access_log: /var/log/access.jsonl}",
        "records: {dir: /var/lib/firsttoken/records, size: 1GB}",
        "x-mine: {anything: [goes]}",
        "passthrough: openai",
    ],
)
def test_every_form_of_a_value_is_valid(text: str) -> None:
    """Text with units, words, and variables in place of numbers."""
    assert errors(text) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("servr: {}", ""),
        ("server: {workers: many}", "server.workers"),
        ("pools: {p: {backend: vlm}}", "pools.p.backend"),
        ("pools: {p: {}}", "pools.p"),
        ("pools: {p: {backend: vllm, endpoints: [10.0.0.1]}}", "pools.p.endpoints.0"),
        ("routes: {r: {tiers: [p], ttft: {budget: 800}}}", "routes.r.ttft"),
        ("routes: {r: {tiers: [p], prefer: cheap}}", "routes.r.prefer"),
        ("routes: {r: {tiers: [p], escalate: [refusl]}}", "routes.r.escalate.0"),
        ("routes: {r: {name: r, tiers: [p]}}", "routes.r"),
        ("routes: {r: {tiers: [{pool: p, when: {turn: 1}}]}}", "routes.r.tiers.0"),
        ("telemetry: {access_log: stdot}", "telemetry.access_log"),
        ("keys: [{name: a, sha256: my-key}]", "keys.0.sha256"),
    ],
)
def test_mistakes_are_located(text: str, where: str) -> None:
    """In the editor, before anything is run."""
    assert errors(text) == [where]


def defaults(node: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Every default in a schema, with the schema around the default."""
    if isinstance(node, list):
        return [found for item in node for found in defaults(item)]
    if not isinstance(node, dict):
        return []
    own = [(node["default"], node)] if "default" in node else []
    return own + [found for value in node.values() for found in defaults(value)]


def test_every_default_is_a_valid_value() -> None:
    """Editors offer defaults for completion."""
    assert len(defaults(SCHEMA)) > 20
    for default, node in defaults(SCHEMA):
        Draft202012Validator({"$defs": SCHEMA["$defs"], **node}).validate(default)


def test_keys_are_found_through_lists_maps_and_alternatives() -> None:
    """Paths contain names of pools and indices of tiers."""
    assert keys_at(SCHEMA, ("pools", "backend", "price")) == [
        "input",
        "cached_input",
        "cache_write",
        "cache_write_1h",
        "output",
    ]
    assert keys_at(SCHEMA, ("routes", "r", "tiers", 0)) == ["pool", "when", "adapter", "after", "beside", "weight"]
    assert keys_at(SCHEMA, ("keys", 3, "nowhere")) == []


def test_words_are_found_beside_keys() -> None:
    """A budget is a mapping, or off."""
    assert words_at(SCHEMA, ("routes", "r", "ttft")) == ["off"]


def test_the_string_below_a_field_describes_it_in_the_schema() -> None:
    """A field whose type has a text of its own and a field of a base class included."""

    class Base(BaseModel):
        port: int
        """Port of
        the server."""
        plain: str

    class Child(Base):
        listen: Annotated[str, Field(description="host:port")]
        """Where callers connect."""

    assert descriptions(Child) == {"port": "Port of\nthe server.", "listen": "Where callers connect."}
    server = schema()["$defs"]["ServerSection"]["properties"]
    assert server["listen"]["description"] == "Data port, host:port."


@pytest.mark.parametrize("found", [None, "", "x = (", "class Other:\n    port: int\n    'Of another.'\n"])
def test_a_model_without_its_source_has_no_descriptions(
    found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schema explains mistakes in a configuration: also where no source is installed, and where an upgrade has
    replaced it under a running gateway."""
    module = ModuleType(str(tmp_path))
    module.__file__ = str(tmp_path / "models.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if found is not None:
        Path(module.__file__).write_text(found)
    exec("from pydantic import BaseModel\nclass Model(BaseModel):\n    port: int\n    'Port.'", vars(module))
    assert descriptions(module.Model) == {}
