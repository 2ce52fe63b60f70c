"""JSON Schema of the configuration file, in its written form: durations as text, tiers as names.

Generated from the models; forms that input validators accept beyond the fields are added here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from gateway.config.config_errors import Path
from gateway.config.models import Config

_VARIABLE = {"type": "string", "pattern": r"\$\{", "description": "${NAME} or ${NAME:-default}, from the environment"}
# Models with a plain text form.
BARE = {
    "Tier": {"type": "string", "description": "the name of a pool"},
    "EndpointSection": {"type": "string", "pattern": "^https?://", "description": "the URL of a server"},
}


class _AsWritten(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Omits section and null defaults, which pydantic shows in validated form."""
        generated = super().default_schema(schema)
        if not isinstance(generated.get("default"), (str, int, float)):
            generated.pop("default", None)
        return generated


@cache
def schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12. Cached: callers must not change the result."""
    generated = Config.model_json_schema(schema_generator=_AsWritten)
    models = generated["$defs"]
    models["Route"]["properties"].pop("name")
    for name, bare in BARE.items():
        models[name] = {"anyOf": [bare, models[name]]}
    generated = _with_variables(generated)
    generated["$defs"]["Variable"] = _VARIABLE
    generated["patternProperties"] = {"^x-": {"description": "Yours: a place for anchors, ignored."}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **generated, "title": "firsttoken"}


def keys_at(document: dict[str, Any], path: Path) -> list[str]:
    """Allowed keys of the mapping at `path`."""
    return [key for node in _nodes_at(document, path) for key in node.get("properties", {})]


def words_at(document: dict[str, Any], path: Path) -> list[str]:
    """Allowed literals at `path`, such as `off`."""
    return [node["const"] for node in _nodes_at(document, path) if "const" in node]


def _nodes_at(document: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    nodes = _alternatives(document, document)
    for part in path:
        nodes = [alternative for node in nodes for alternative in _alternatives(_step(node, part), document)]
    return nodes


def _with_variables(node: Any) -> Any:
    """Allows a variable in place of every value that is not free text."""
    if isinstance(node, list):
        return [_with_variables(item) for item in node]
    if not isinstance(node, dict):
        return node
    if _constrained(node):
        outer = {key: node[key] for key in ("description", "default") if key in node}
        inner = {key: value for key, value in node.items() if key not in outer}
        return {"anyOf": [inner, {"$ref": "#/$defs/Variable"}], **outer}
    return {key: _with_variables(value) for key, value in node.items()}


def _constrained(node: dict[str, Any]) -> bool:
    kind = node.get("type")
    return kind in ("integer", "number", "boolean") or (
        kind == "string" and not node.keys().isdisjoint({"pattern", "enum", "const"})
    )


def _alternatives(node: Any, document: dict[str, Any]) -> list[dict[str, Any]]:
    if not isinstance(node, dict):
        return []
    if "$ref" in node:
        return _alternatives(document["$defs"][node["$ref"].rpartition("/")[2]], document)
    if "anyOf" in node:
        return [found for option in node["anyOf"] for found in _alternatives(option, document)]
    return [node]


def _step(node: dict[str, Any], part: str | int) -> Any:
    if isinstance(part, int):
        return node.get("items")
    return node.get("properties", {}).get(part, node.get("additionalProperties"))
