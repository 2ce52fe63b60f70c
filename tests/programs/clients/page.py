"""Writes docs/clients.md from the results of the runs, kept in results.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from scripts.vllm_setup import VLLM
from tests.programs.clients.manifest import FOLDER, Client, clients
from tests.programs.clients.run import ClientRun

RESULTS = FOLDER / "results.json"
REFUSAL = re.compile(r"No tier of this route can take the request: .*?\.(?=['\"]|$)")
TITLES = {"chat": "chat engine", "messages": "Messages engine", "vllm": "real vLLM"}
HEAD = """# Clients

Released clients, run unmodified against a gateway. `make clients` installs each into an environment of its own, starts
a gateway process, runs the checks of tests/programs/clients, and writes this page: once in front of a simulated engine
that speaks OpenAI's chat, completions and embeddings alone, and once in front of one that speaks Anthropic's Messages
alone, which have no completions, no embeddings and no JSON without a schema: those requests are refused by name.
`make vllm` runs the same checks in front of two real engines (ENGINE), with vLLM's own chat, Responses and
Messages, tool calls, reasoning, grammars, prefix caches and stored responses. A logits processor in each engine chooses
the tokens of the answers, because a tiny model on a CPU calls no tool of its own will.
`make clients ARGS="--only openai-python,codex"` runs some and keeps the others' results. A date behind a count is that
of a run before the latest one. Versions are pinned in
`tests/programs/clients/versions.toml`.

Every client gets its base URL, a key and a model name, and no patch; options that a check needs are named below. A
check passes if the client returns what the engine said, or raises its own exception of that kind.

- Coding agents get the settings of [agents](agents.md), and nothing else, before an engine of 32,768 tokens that
  refuses one token too many. Codex takes `openai_base_url` and `codex login --with-api-key` too. It tries a WebSocket
  first, and is served there.
- LlamaIndex's `OpenAI` knows the names of OpenAI's models alone: name a route so, or use its `OpenAILike`.
- LangChain's `OpenAIEmbeddings` counts tokens with files that tiktoken downloads: `check_embedding_ctx_length=False`
  sends texts as they are.
- Clients that go on from an earlier response (`previous_response_id`) are checked with engines that keep responses: a
  chat engine keeps none, so the gateway refuses the member by name.
"""


def write(target: Path, engine: str, runs: Mapping[str, ClientRun]) -> None:
    """Add the runs to the results, and write the page."""
    results = load()
    dated = {name: {**asdict(run), "date": date.today().isoformat()} for name, run in runs.items()}
    results[engine] = results.get(engine, {}) | dated
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    target.write_text(page(results), "utf-8")


def load() -> dict[str, Any]:
    """By engine, then by client."""
    found: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return found


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page of docs."""
    head = HEAD.replace("ENGINE", VLLM.replace("==", " "))
    parts = (head, *_summary(results), "", *_shortfalls(results), *_left_out(results), *_checks(results))
    return "\n".join(parts) + "\n"


def _listed(results: Mapping[str, Mapping[str, Any]]) -> list[Client]:
    """Clients with a result, in the order of versions.toml."""
    return [client for client in clients() if any(client.name in found for found in results.values())]


def _summary(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for engine, found in results.items():
        passed = sum(len(run["passed"]) for run in found.values())
        total = passed + sum(len(run["failed"]) for run in found.values())
        yield f"**{TITLES[engine]}: {passed} of {total} checks of {len(found)} clients pass.**\n"
    titles = " | ".join(TITLES[engine] for engine in results)
    yield f"| client | packages | settings | {titles} | run |"
    yield "|---" * (4 + len(results)) + "|"
    for client in _listed(results):
        runs = [found.get(client.name) for found in results.values()]
        last = max((run for run in runs if run), key=lambda run: str(run["date"]))
        counts = " | ".join(_count(run, last["date"]) if run else "" for run in runs)
        packages = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
        yield f"| {client.name} | {packages} | `{client.settings}` | {counts} | {last['date']} |"


def _count(run: Mapping[str, Any], latest: str) -> str:
    """Passed checks, with the date of a run before the latest one."""
    earlier = f" ({run['date']})" if run["date"] != latest else ""
    return f"{len(run['passed'])} of {len(run['passed']) + len(run['failed'])}{earlier}"


def _shortfalls(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Failed checks, each with a reason."""
    yield "## What does not pass\n"
    rows = [row for engine, found in results.items() for row in _failed(engine, found)]
    yield from ("| engine | client | check | reason |", "|---|---|---|---|", *rows) if rows else ["Nothing."]
    yield ""


def _left_out(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Checks that an engine cannot serve, by reason."""
    grouped: dict[tuple[str, str], dict[str, list[str]]] = {}
    for engine, found in results.items():
        for client in _listed({engine: found}):
            for check, reason in found[client.name].get("left_out", {}).items():
                grouped.setdefault((TITLES[engine], reason), {}).setdefault(check, []).append(client.name)
    if not grouped:
        return
    yield "## What is not asked\n"
    yield "| engine | reason | checks | clients |\n|---|---|---|---|"
    for (title, reason), checks in grouped.items():
        clients = dict.fromkeys(name for names in checks.values() for name in names)
        yield f"| {title} | {reason} | {'; '.join(checks)} | {', '.join(clients)} |"
    yield ""


def _failed(engine: str, found: Mapping[str, Any]) -> Iterator[str]:
    for client in _listed({engine: found}):
        run = found[client.name]
        for check, reason in run["failed"].items():
            yield f"| {TITLES[engine]} | {client.name} | {check} | {client.notes.get(check) or _cell(reason)} |"
        if run["ended"]:
            yield f"| {TITLES[engine]} | {client.name} | the rest | {_cell(run['ended'])} |"


def _cell(text: str) -> str:
    """A refusal in the gateway's own words; another reason in the client's, cut short."""
    if refusal := REFUSAL.search(text):
        return refusal[0]
    return " ".join(text.split()).replace("|", "\\|")[:300]


def _checks(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "## Checks\n"
    yield "| client | checks |\n|---|---|"
    for client in _listed(results):
        run = next(found[client.name] for found in results.values() if client.name in found)
        checks = [*run["passed"], *run["failed"], *run.get("left_out", ())]
        yield f"| {client.name} | {'; '.join(checks)} |"
