"""Writes docs/agents.md from the settings of gateway/cli/agents/recipes.py.

python -m scripts.agents_page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gateway.cli.agents.recipes import AGENTS, Agent, GatewayFacts, settings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "agents.md"
EXAMPLE = GatewayFacts("http://127.0.0.1:8080", "YOUR-KEY", "chat", "chat", 32_768)
HEAD = """# Coding agents

The settings of each agent for a gateway on this machine, a route `chat` and a model of 32,768 tokens. Filled in for a
running gateway, with its address, names and windows:

```sh
firsttoken agents                       # the names of the agents
firsttoken agents claude-code           # what to paste; --model chooses a route, --url another gateway
```

`YOUR-KEY` is a key of the gateway ([keys](keys.md)), or any text where it has none. Nothing is
written: variables go into the shell or its profile, files where their heading says, beside what is in them. The checks
of `make clients` take the same settings and nothing else ([clients](clients.md)): each agent answers, and edits a file.

This holds before engines of each dialect: chat completions, Responses, or Anthropic's alone (an `anthropic` pool).

What the gateway does for all of them, unasked:

- An output limit that does not fit beside the prompt is lowered to what fits: `x-firsttoken-max-tokens` says to how
  much. The pool needs its `context_window`.
- A prompt that leaves no room is a 400, in the words by which Claude Code compacts.
- Tools that an engine cannot run are left out where an agent can do without: `x-firsttoken-left-out` names them.
- `workload: agent` of the route never ends an answer while tokens come.

<!-- check: alone -->
```yaml
pools:
  small: {backend: vllm, model: qwen3-8b, endpoints: [http://10.0.0.11:8000], context_window: 32768}
routes:
  chat: {workload: agent, tiers: [small], aliases: ["claude-*"]}
```
"""


def page() -> str:
    """The page of docs."""
    return HEAD + "".join("\n" + "\n".join(_section(agent)) + "\n" for agent in AGENTS.values())


def _section(agent: Agent) -> Iterator[str]:
    found = settings(agent, EXAMPLE)
    yield f"## {agent.title}\n"
    if found.variables:
        yield "```sh"
        yield from (f"export {name}={value}" for name, value in found.variables.items())
        yield "```"
    for path, text in found.files.items():
        yield f"\n`{path}`:\n\n```{_language(path)}\n{text.rstrip()}\n```"
    yield f"\nThen `{found.command}`."
    if agent.about:
        yield f"\n{agent.about}"


def _language(path: str) -> str:
    return {"json": "json", "toml": "toml"}.get(path.rpartition(".")[2], "")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
