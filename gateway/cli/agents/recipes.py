"""Settings of coding agents: what a user pastes to reach a gateway.

The one source of docs/agents.md, of `firsttoken agents`, and of the checks with the real agents (`make clients`).

Rules:
- A line of a template that names an unknown value (`$window`) is left out.
- Files hold names of variables, not keys, where the agent can read one.
- A file is shown, never written: the user has one already, perhaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from shlex import quote
from string import Template

KEY_VARIABLE = "FIRSTTOKEN_KEY"
CLAUDE_RESERVE = 13_000  # context tokens that Claude Code 2.1 keeps free, besides an answer
ANSWERS = 4  # a quarter of the window is for the answer


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """The address and models of a gateway. `url`: without `/v1`; `window`: tokens; None: unknown."""

    url: str
    key: str
    model: str
    small_model: str
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Agent:
    """Templates of an agent's settings. `files`: text by path; `about`: sentences of the page."""

    name: str
    title: str
    command: str
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    about: str = ""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of an agent for one gateway."""

    command: str
    variables: Mapping[str, str]
    files: Mapping[str, str]


CLAUDE_CODE = Agent(
    name="claude-code",
    title="Claude Code",
    command="claude",
    variables={
        "ANTHROPIC_BASE_URL": "$url",
        "ANTHROPIC_AUTH_TOKEN": "$key",
        "ANTHROPIC_MODEL": "$model",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "$model",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "$model",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$small_model",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "$claude_window",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "$output",
    },
    about="""Without the names of models it asks for Anthropic's own, which a route with `aliases: [claude-*]` takes.
`CLAUDE_CODE_MAX_CONTEXT_TOKENS` is 13,000 more than the window: so much, and an answer, it keeps free. It compacts the
conversation before what is left is full, or else at the gateway's refusal.

With a subscription or a key of your own, before a pool of `backend: anthropic, api_key: caller`
([callers' own keys](keys.md#callers-own-keys)): leave `ANTHROPIC_AUTH_TOKEN` and the models out, and log in. Where
the gateway has keys, its own goes beside: `export ANTHROPIC_CUSTOM_HEADERS="x-firsttoken-key: YOUR-KEY"`. Not tried
with a real subscription here; whether it may be used so is for the provider's terms to say.""",
)
CODEX = Agent(
    name="codex",
    title="Codex",
    command="codex",
    variables={KEY_VARIABLE: "$key"},
    files={
        "~/.codex/config.toml": f"""model = "$model"
model_provider = "firsttoken"
model_context_window = $window

[model_providers.firsttoken]
name = "firsttoken"
base_url = "$url/v1"
env_key = "{KEY_VARIABLE}"
wire_api = "responses"
"""
    },
    about="""It speaks Responses, which the gateway translates for engines that do not: tools of MCP servers are
functions there, and the tool that only OpenAI runs (`web_search`) is left out, as `x-firsttoken-left-out` tells.
It compacts by `model_context_window` alone, not by a refusal.""",
)
OPENCODE = Agent(
    name="opencode",
    title="opencode",
    command="opencode",
    variables={KEY_VARIABLE: "$key"},
    files={
        "~/.config/opencode/opencode.json": f"""{{
  "$$schema": "https://opencode.ai/config.json",
  "model": "firsttoken/$model",
  "small_model": "firsttoken/$model",
  "provider": {{
    "firsttoken": {{
      "npm": "@ai-sdk/openai-compatible",
      "options": {{"baseURL": "$url/v1", "apiKey": "{{env:{KEY_VARIABLE}}}"}},
      "models": {{
        "$model": {{
          "limit": {{"context": $window, "output": $output}},
          "name": "$model"
        }}
      }}
    }}
  }}
}}
"""
    },
    about="""`limit` is what it compacts by: a gateway's model is in none of its lists.""",
)
AIDER = Agent(
    name="aider",
    title="aider",
    command="aider",
    variables={"OPENAI_API_BASE": "$url/v1", "OPENAI_API_KEY": "$key"},
    files={
        "~/.aider.conf.yml": """model: openai/$model
weak-model: openai/$small_model
show-model-warnings: false
""",
        "~/.aider.model.metadata.json": """{
  "openai/$model": {
    "max_input_tokens": $window,
    "litellm_provider": "openai",
    "mode": "chat"
  }
}
""",
    },
    about="""The prefix `openai/` is aider's word for the dialect, and is not sent. It edits by text, not by tools: any
chat model will do.""",
)
CLINE = Agent(
    name="cline",
    title="Cline",
    command=f"cline auth --provider openai-compatible --apikey $${KEY_VARIABLE} --modelid $model --baseurl $url/v1"
    " && cline",
    variables={KEY_VARIABLE: "$key"},
    about="""In VS Code and JetBrains choose the provider "OpenAI Compatible", and enter the same address, key and model
in its fields.""",
)
CONTINUE = Agent(
    name="continue",
    title="Continue",
    command="cn --config ~/.continue/config.yaml",
    files={
        "~/.continue/config.yaml": """name: firsttoken
version: 1.0.0
schema: v1
models:
  - name: $model
    provider: openai
    model: $model
    apiBase: $url/v1
    apiKey: $key
    roles: [chat, edit, apply]
    capabilities: [tool_use]
    defaultCompletionOptions:
      contextLength: $window
      maxTokens: $output
"""
    },
    about="""In VS Code and JetBrains, and on the command line (`cn`), from the same file.""",
)
AGENTS: Mapping[str, Agent] = {agent.name: agent for agent in (CLAUDE_CODE, CODEX, OPENCODE, AIDER, CLINE, CONTINUE)}


def settings(agent: Agent, facts: GatewayFacts) -> AgentSettings:
    """The agent's settings for a gateway."""
    values = _values(facts)
    filled = {name: _filled(template, values) for name, template in agent.variables.items()}
    return AgentSettings(
        command=_filled(agent.command, values),
        variables={name: value for name, value in filled.items() if value},
        files={path: _filled(template, values) for path, template in agent.files.items()},
    )


def shown(found: AgentSettings) -> Iterator[str]:
    """The settings as text to paste: variables for a shell, then each file, then the command."""
    for name, value in found.variables.items():
        yield f"export {name}={quote(value)}"
    for path, text in found.files.items():
        yield f"\n# {path}"
        yield text.rstrip("\n")
    yield f"\n# then\n{found.command}"


def _values(facts: GatewayFacts) -> Mapping[str, str]:
    known = {"url": facts.url, "key": facts.key, "model": facts.model, "small_model": facts.small_model}
    if facts.window is None:
        return known
    claude_window, output = facts.window + CLAUDE_RESERVE, facts.window // ANSWERS
    return {**known, "window": str(facts.window), "claude_window": str(claude_window), "output": str(output)}


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Fill a template. Lines that name an unknown value are left out."""
    lines = template.splitlines(keepends=True)
    return "".join(Template(line).substitute(values) for line in lines if _names(line) <= values.keys())


def _names(line: str) -> set[str]:
    return set(Template(line).get_identifiers())
