"""The JSON Schema of the chart's values: its own keys, and those of the gateway's configuration."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.config.schema import schema
from gateway.part_list import CONFIG

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
SECONDS: Schema = {"type": "integer", "minimum": 0, "maximum": 86400}
REPLICAS: Schema = {"type": "integer", "minimum": 1, "maximum": 1000}
NAME: Schema = {"type": "string", "pattern": "^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$", "maxLength": 253}
SIZE: Schema = {"type": ["string", "integer"], "pattern": "^[0-9]+(\\.[0-9]+)?([KMGT]i?)?$"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
ANY: Schema = {"type": "object"}
ANYTHING: Schema = {"type": "array", "items": ANY}
DURATION: Schema = {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}
VARIABLE_NAME = "^[A-Za-z_][A-Za-z0-9_]*$"
# Keys that the chart sets itself, by definition of the configuration.
OWNED = {
    "ServerSection": ("listen", "admin", "drain", "tls"),
    "StateSection": ("redis", "dir"),
    "PickSection": ("listen",),
}


def section(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """A mapping without other keys."""
    found: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**found, "required": [*required]} if required else found


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": [*values]}


def image(*required: str) -> Schema:
    repository, digest = {"type": "string", "minLength": 1}, {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}
    pull = one_of("Always", "IfNotPresent", "Never")
    return section(required, repository=repository, tag=TEXT, digest=digest, pullPolicy=pull)


def values_schema() -> Schema:
    """Draft 2020-12."""
    definitions = gateway_definitions()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart firsttoken",
        **section(("image", "config"), **_own(), **_optional(), config={"$ref": "#/$defs/Config"}),
        "$defs": definitions,
    }


def _own() -> dict[str, Schema]:
    secret = section(("secret", "key"), secret={**NAME, "minLength": 1}, key={**TEXT, "minLength": 1})
    peers = {
        "type": "array",
        "items": section(podSelector=ANY, namespaceSelector=ANY, ipBlock=ANY) | {"minProperties": 1},
    }
    own_image = image("repository")
    own_image["properties"]["pullSecrets"] = {"type": "array", "items": NAME}
    return {
        "global": ANY,
        "mode": one_of("serve", "pick"),
        "replicas": REPLICAS,
        "fullnameOverride": {**NAME, "maxLength": 40},
        "image": own_image,
        "env": {
            "type": "object",
            "propertyNames": {"pattern": VARIABLE_NAME},
            "additionalProperties": {"anyOf": [secret, section(("value",), value=TEXT)]},
        },
        "redis": section(secret=NAME, key={**TEXT, "minLength": 1}),
        "tls": section(secret=NAME),
        "drain": section(wait=SECONDS, grace=SECONDS),
        "service": section(type=one_of("ClusterIP", "NodePort", "LoadBalancer"), port=PORT, annotations=TEXTS),
        "serviceAccount": section(create=FLAG, name=NAME, annotations=TEXTS),
        "rbac": section(create=FLAG),
        "networkPolicy": section(
            enabled=FLAG, callers=peers, pickers=peers, admin=peers, scaler=peers, egress=ANYTHING
        ),
        "podDisruptionBudget": section(
            maxUnavailable={"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%$"}
        ),
        "resources": ANY,
        "stateSize": SIZE,
        "podAnnotations": TEXTS,
        "podLabels": TEXTS,
        "nodeSelector": TEXTS,
        "tolerations": ANYTHING,
        "affinity": ANY,
        "priorityClassName": NAME,
        "volumes": ANYTHING,
        "volumeMounts": ANYTHING,
    }


def _optional() -> dict[str, Schema]:
    engine = section(
        ("name", "max"),
        kind={**TEXT, "minLength": 1},
        name={**NAME, "minLength": 1},
        min=SECONDS,
        max=REPLICAS,
        startTime=DURATION,
    )
    return {
        "monitoring": section(
            serviceMonitor=section(enabled=FLAG, interval=DURATION, labels=TEXTS),
            rules=section(enabled=FLAG, labels=TEXTS),
            dashboards=section(enabled=FLAG, labels=TEXTS, annotations=TEXTS),
        ),
        "autoscaling": section(
            trigger={},  # refused by templates/checks.yaml, which says what to do
            prometheusAddress={},
            engines={"type": "object", "additionalProperties": engine},
            resources=ANY,
        ),
        "inferencePool": section(
            enabled=FLAG,
            name=NAME,
            selector=TEXTS,
            targetPorts={"type": "array", "items": PORT, "minItems": 1, "maxItems": 8, "uniqueItems": True},
            failureMode=one_of("FailOpen", "FailClose"),
        ),
        "envoy": section(
            enabled=FLAG,
            replicas=REPLICAS,
            image=image(),
            engines=section(selector=TEXTS, host=NAME, port=PORT),
            maxBodyBytes={"type": "integer", "minimum": 65536, "maximum": 1 << 31},
            resources=ANY,
        ),
    }


# ---------------------------------------------------------------- the gateway's configuration


def gateway_definitions() -> dict[str, Schema]:
    """Definitions of the configuration, `Config` included, without what the chart sets."""
    whole = copy.deepcopy(schema(CONFIG))
    definitions: dict[str, Schema] = whole.pop("$defs")
    for name, keys in OWNED.items():
        for key in keys:
            del definitions[name]["properties"][key]
    config = {key: whole[key] for key in ("properties", "type", "additionalProperties")}
    definitions["Config"] = {**config, "required": ["pools"]}
    return {name: _told_by_type(each, definitions) for name, each in definitions.items()}


# Helm tells the errors of every branch of an `anyOf`, and of those around it. A value is of one JSON type, so of
# branches with different types the one of its own type is asked alone.


def _told_by_type(value: Any, definitions: Mapping[str, Schema]) -> Any:
    if isinstance(value, list):
        return [_told_by_type(each, definitions) for each in value]
    if not isinstance(value, dict):
        return value
    told = {key: _told_by_type(each, definitions) for key, each in value.items() if key != "anyOf"}
    if "anyOf" not in value:
        return told
    by_type: dict[str, list[Schema]] = {}
    for branch in _branches(value, definitions):
        for kind in _types(branch, definitions):
            by_type.setdefault(kind, []).append(branch)
    if "" in by_type or any(len(each) > 1 and kind != "string" for kind, each in by_type.items()):
        return {**told, "anyOf": _told_by_type(value["anyOf"], definitions)}
    rules = []
    for kind, branches in by_type.items():
        rule = _joined(branches, definitions) if kind == "string" else _told_by_type(branches[0], definitions)
        if rule not in ({"type": kind}, {}):
            rules.append({"if": {"type": kind}, "then": rule})
    if len(by_type) == 1 and rules:
        return {**told, **rules[0]["then"], "type": next(iter(by_type))}
    return {**told, "type": [*by_type], **({"allOf": rules} if rules else {})}


def _branches(value: Schema, definitions: Mapping[str, Schema]) -> Iterator[Schema]:
    """Of an `anyOf`, and of those within it, also by reference."""
    for branch in value["anyOf"]:
        target = _resolved(branch, definitions)
        if "anyOf" in target:
            yield from _branches(target, definitions)
        else:
            yield branch


def _resolved(branch: Schema, definitions: Mapping[str, Schema]) -> Schema:
    return definitions[branch["$ref"].rpartition("/")[2]] if "$ref" in branch else branch


def _types(branch: Schema, definitions: Mapping[str, Schema]) -> list[str]:
    """JSON types; an empty one where it does not say."""
    target = _resolved(branch, definitions)
    if "const" in target or "enum" in target:
        values = target.get("enum", [target.get("const")])
        return ["string"] if all(isinstance(each, str) for each in values) else [""]
    found = target.get("type", "")
    return found if isinstance(found, list) else [found]


def _joined(branches: list[Schema], definitions: Mapping[str, Schema]) -> Schema:
    """One rule for text that any of these takes."""
    patterns = []
    for branch in branches:
        target = _resolved(branch, definitions)
        if "const" in target or "enum" in target:
            patterns.append(f"^({'|'.join(map(re.escape, target.get('enum', [target.get('const')])))})$")
        elif "pattern" in target and "maxLength" not in target and "minLength" not in target:
            patterns.append(target["pattern"])
        else:
            return {"anyOf": branches} if len(branches) > 1 else branch
    return {"pattern": "|".join(dict.fromkeys(patterns))}
