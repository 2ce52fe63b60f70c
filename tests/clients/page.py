"""Writes docs/clients.md from the results of the runs, which are kept in results.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from tests.clients.manifest import FOLDER, Client, clients
from tests.clients.run import DROPPED, ClientRun

RESULTS = FOLDER / "results.json"
HEAD = """# Clients

Released clients, run unmodified against a gateway. `make clients` installs each into an environment of its own, starts
a gateway process in front of a simulated engine that speaks OpenAI's dialect alone (`/v1/chat/completions`,
`/v1/completions`, `/v1/embeddings`), runs the checks of tests/clients, and writes this page;
`make clients ARGS="--only openai-python,codex"` runs some and keeps the others' results. Versions are pinned in
`tests/clients/versions.toml`.

Every client gets its base URL, a key and a model name, and nothing else: no option or patch for the gateway's sake. A
check passes if the client returns what the engine said, or raises its own exception of that kind.

- Codex takes these two from a provider in its `config.toml` (`wire_api = "responses"`), or from `openai_base_url` and
  `codex login --with-api-key`. It tries a WebSocket first, and is told at once that there is none.
- LlamaIndex's `OpenAI` knows the names of OpenAI's models alone: name a route so, or use its `OpenAILike`.
- LangChain's `OpenAIEmbeddings` counts tokens with files that tiktoken downloads: `check_embedding_ctx_length=False`
  sends texts as they are.
- Clients that go on from an earlier response (`previous_response_id`) are checked with engines that keep responses: a
  chat engine keeps none, so the gateway refuses the member by name.

Codex always offers tools that a chat engine cannot have: search by the provider, tools in groups. The route
[drops](dialects.md) them:

<!-- check: alone -->
```yaml
pools:
  small: {backend: llamacpp, model: qwen3-8b, endpoints: [http://10.0.0.11:8000]}
routes:
  chat: {workload: agent, tiers: [small], drop: [DROPPED]}
```
"""


def write(target: Path, runs: Mapping[str, ClientRun]) -> None:
    """Add the runs to the results, and write the page."""
    results = load() | {name: {**asdict(run), "date": date.today().isoformat()} for name, run in runs.items()}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")
    target.write_text(page(results), "utf-8")


def load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return found


def page(results: Mapping[str, Any]) -> str:
    listed = [client for client in clients() if client.name in results]
    parts = (
        HEAD.replace("DROPPED", ", ".join(DROPPED)),
        *_summary(listed, results),
        "",
        *_shortfalls(listed, results),
        *_checks(listed, results),
    )
    return "\n".join(parts) + "\n"


def _summary(listed: list[Client], results: Mapping[str, Any]) -> Iterator[str]:
    passed = sum(len(results[client.name]["passed"]) for client in listed)
    failed = sum(len(results[client.name]["failed"]) for client in listed)
    yield f"**{passed} of {passed + failed} checks of {len(listed)} clients pass.**\n"
    yield "| client | packages | settings | checks that pass | run |"
    yield "|---|---|---|---|---|"
    for client in listed:
        found = results[client.name]
        packages = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        total = len(found["passed"]) + len(found["failed"])
        settings = f"`{client.settings}`"
        yield f"| {client.name} | {packages} | {settings} | {len(found['passed'])} of {total} | {found['date']} |"


def _shortfalls(listed: list[Client], results: Mapping[str, Any]) -> Iterator[str]:
    """Every check that does not pass, with its reason."""
    rows = [(client, check, reason) for client in listed for check, reason in results[client.name]["failed"].items()]
    rows += [(client, "all", results[client.name]["ended"]) for client in listed if results[client.name]["ended"]]
    yield "## What does not pass\n"
    if not rows:
        yield "Nothing.\n"
        return
    yield "| client | check | reason |\n|---|---|---|"
    for client, check, reason in rows:
        yield f"| {client.name} | {check} | {client.notes.get(check) or _cell(reason)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]


def _checks(listed: list[Client], results: Mapping[str, Any]) -> Iterator[str]:
    yield "## Checks\n"
    yield "| client | checks that pass |\n|---|---|"
    for client in listed:
        yield f"| {client.name} | {'; '.join(results[client.name]['passed'])} |"
