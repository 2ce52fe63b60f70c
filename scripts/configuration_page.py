"""Writes docs/configuration.md from the JSON Schema of the configuration: `python scripts/configuration_page.py`.

A table per section of the file; keys of a mapping within a section are written `ttft.budget`, those of a list's items
`tiers[].pool`. configuration_page.md beside this file is the template of the page, and has notes below some tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from gateway.config.schema import schema  # noqa: E402
from gateway.config.yaml_source import preset  # noqa: E402
from gateway.part_list import CONFIG  # noqa: E402
from policies.routes.route import Workload  # noqa: E402

PAGE = ROOT / "docs/configuration.md"
Node = Mapping[str, Any]
PRESET = frozenset(name for workload in get_args(Workload) for name in preset(workload))
PLAIN = {"share": "number, 0 to 1", "size": "integer"}  # forms of text whose plain number needs no word
# Forms of text by a part of their pattern or description.
FORMS = {
    r"us|ms|s|m|h": "duration",
    "KkMmGg": "size",
    "%": "share",
    ":[0-9]+$": "host:port",
    "^https?://": "URL",
    "^http://": "URL",
    "^tcp://": "tcp://host:port",
    "^(rediss?": "Redis URL",
    "0-9a-fA-F": "hex digest",
    "none|minimal": "effort or comparison",
    "<=|>=": "comparison",
    "/[a-z0-9]": "NAMESPACE/NAME",
    "/.": "path",
}
SECTIONS = {  # heading: key of the document
    "server": "server",
    "pools.NAME": "pools",
    "routes.NAME": "routes",
    "defaults": "defaults",
    "keys[]": "keys",
    "state": "state",
    "telemetry": "telemetry",
    "records": "records",
    "pick": "pick",
    "kubernetes": "kubernetes",
}


def page() -> str:
    document = schema(CONFIG)
    template = Path(__file__).with_suffix(".md").read_text("utf-8")
    for heading, key in SECTIONS.items():
        template = template.replace(f"{{{{{heading}}}}}", "\n".join(table(document["properties"][key], document)))
    return template.replace("{{top}}", "\n".join(top(document)))


def top(document: Node) -> Iterator[str]:
    """Keys of the file that are no section."""
    yield from ("| key | type | default | |", "|---|---|---|---|")
    for name, node in document["properties"].items():
        if name not in SECTIONS.values():
            yield row(name, node, document, ())


def table(section: Node, document: Node) -> Iterator[str]:
    yield from ("| key | type | default | |", "|---|---|---|---|")
    inner = section.get("additionalProperties") or section.get("items") or section
    yield from rows("", inner, document)


def rows(prefix: str, node: Node, document: Node) -> Iterator[str]:
    """A row for each key, those of inner mappings behind it."""
    for option in options(node, document):
        for name, inner in option.get("properties", {}).items():
            yield row(f"{prefix}{name}", inner, document, option.get("required", ()))
            items = [found["items"] for found in options(inner, document) if found.get("items")]
            for each in items:
                yield from rows(f"{prefix}{name}[].", each, document)
            if not items:
                yield from rows(f"{prefix}{name}.", inner, document)


def row(name: str, node: Node, document: Node, required: Sequence[str]) -> str:
    kinds = dict.fromkeys(kind_of(option, document) for option in options(node, document))
    plain = {number for form, number in PLAIN.items() if form in kinds}
    default = "required" if name.rpartition(".")[2] in required else default_of(name, node)
    form = " or ".join(kind for kind in kinds if kind not in plain)
    return f"| `{name}` | {form} | {default} | {text_of(node, document)} |"


def default_of(name: str, node: Node) -> str:
    """As written in a file; of a key that workloads set, where the value is."""
    if name in PRESET:
        return "the workload's"
    value = node.get("default", "")
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else ""


def text_of(node: Node, document: Node) -> str:
    """The description of the field, or of the mapping that it holds; none that repeats the type."""
    found = node.get("description") or next(
        (option["description"] for option in options(node, document) if option.get("description")), ""
    )
    text = " ".join(str(found).split()).replace("|", r"\|")
    return "" if text.startswith(("a ", "an effort", "http://", "tcp://", "the ", "${")) else text


def options(node: Node, document: Node) -> list[Node]:
    """Forms that a value may take, without null and variables."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return [] if name == "Variable" else options(document["$defs"][name], document)
    if "anyOf" in node:
        return [found for option in node["anyOf"] for found in options(option, document)]
    return [] if node.get("type") == "null" else [node]


def kind_of(node: Node, document: Node) -> str:
    """The type of a value, with unit or bounds."""
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    if "items" in node:
        inner = dict.fromkeys(kind_of(option, document) for option in options(node["items"], document))
        return f"list of {' or '.join(inner)}"
    if "properties" in node or "additionalProperties" in node:
        return "mapping"
    if node.get("format") == "password":
        return "secret"
    return form_of(node)


def form_of(node: Node) -> str:
    """The name of a pattern of text, or a number with its bounds."""
    if "pattern" in node:
        return next((form for part, form in FORMS.items() if part in node["pattern"]), "text")
    kind = {"string": "text", "boolean": "true or false", "integer": "integer", "number": "number"}[node["type"]]
    if "maximum" not in node:
        return kind
    low = node.get("minimum", 1 if kind == "integer" else 0)
    return f"{kind}, {low} to {node['maximum']:,.0f}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
