"""Twelve configuration files of LiteLLM's proxy, the requests that are sent through each, and the faults planted.

`@NAME` in a file is the port of a provider (`tests.support.fake_providers`). A deployment's group is written in its
provider's name: `main1` and `main2` are of the group `main`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.fake_providers import Fault

REQUESTS = 200
MASTER_KEY = "sk-litellm-master-0123456789"


@dataclass(frozen=True)
class LitellmFile:
    """`models`: names that the requests send, in turns. `long`: of every so many requests the prompt has 6,000 words.
    `spread`: shares of answers by provider, within 0.15, where the file divides them."""

    name: str
    text: str
    faults: Mapping[str, Sequence[Fault]] = field(default_factory=dict)
    models: tuple[str, ...] = ("main",)
    long: int = 0
    concurrent: int = 4
    spread: Mapping[str, float] = field(default_factory=dict)

    @property
    def providers(self) -> list[str]:
        return list(dict.fromkeys(re.findall(r"@([a-z]+\d?)", self.text)))

    def written(self, ports: Mapping[str, int]) -> str:
        return re.sub(r"@([a-z]+\d?)", lambda match: str(ports[match[1]]), self.text)

    def body(self, number: int) -> dict[str, object]:
        text = f"request {number}" + (" and so on" * 2000 if self.long and number % self.long == 0 else "")
        model = self.models[number % len(self.models)]
        streamed = number // len(self.models) % 2 == 1
        return {"model": model, "messages": [{"role": "user", "content": text}], "stream": streamed}


def group_of(provider: str) -> str:
    return provider.rstrip("0123456789")


def openai(name: str, group: str = "", more: str = "", info: str = "") -> str:
    """An entry of `model_list` at the provider of this name."""
    params = (
        f"model: openai/gpt-{group_of(name)}, api_base: 'http://127.0.0.1:@{name}/v1', api_key: sk-provider-key-1234567"
    )
    return (
        f"  - model_name: {group or group_of(name)}\n    litellm_params: {{{params}{', ' if more else ''}{more}}}\n"
        + (f"    model_info: {{{info}}}\n" if info else "")
    )


def anthropic(name: str, group: str = "", more: str = "") -> str:
    url = f"'http://127.0.0.1:@{name}'"
    params = f"model: anthropic/claude-{group_of(name)}, api_base: {url}, api_key: sk-ant-key-1234567890"
    return f"  - model_name: {group or group_of(name)}\n    litellm_params: {{{params}{', ' if more else ''}{more}}}\n"


def models(*entries: str) -> str:
    return "model_list:\n" + "".join(entries)


DEAD = Fault("500")

FILES = (
    LitellmFile(
        "slow first tokens, and a fallback that is quick",
        models(openai("main1"), openai("main2"), openai("main3"), openai("spare"))
        + "router_settings: {num_retries: 2, fallbacks: [{main: [spare]}]}\n",
        {name: (Fault("slow", seconds=1.3),) for name in ("main1", "main2", "main3")},
        concurrent=25,
        spread={"main1": 1 / 3, "main2": 1 / 3, "main3": 1 / 3},
    ),
    LitellmFile(
        "a dead group",
        models(openai("main1"), openai("main2"), openai("main3"), openai("spare"))
        + "litellm_settings: {num_retries: 2, fallbacks: [{main: [spare]}]}\n",
        {"main1": (DEAD,), "main2": (DEAD,), "main3": (DEAD,)},
    ),
    LitellmFile(
        "one deployment is asked again before its fallback",
        models(openai("main"), openai("spare"))
        + "litellm_settings: {num_retries: 2}\nrouter_settings: {fallbacks: [{main: [spare]}]}\n",
        {"main": (Fault("500", 9, 2, times=2), Fault("500", 9, 6), Fault("500", 18, 4, times=1))},
    ),
    LitellmFile(
        "a fallback for long prompts alone",
        models(openai("main"), openai("long"))
        + "router_settings: {num_retries: 1, context_window_fallbacks: [{main: [long]}]}\n",
        {"main": (Fault("context", 5, 1), Fault("500", 10, 4), Fault("slow", 10, 7, seconds=1.2))},
    ),
    LitellmFile(
        "a fallback for refused content, and another for failures",
        models(openai("main"), openai("lenient"), openai("spare"))
        + "litellm_settings: {num_retries: 1, fallbacks: [{main: [spare]}], "
        "content_policy_fallbacks: [{main: [lenient]}]}\n",
        {"main": (Fault("content", 5, 1), Fault("500", 10, 3), Fault("filtered", 20, 8))},
    ),
    LitellmFile(
        "every refusal goes to the fallbacks, without lists of their own",
        models(anthropic("main"), openai("spare"), openai("last"))
        + "router_settings: {num_retries: 0, fallbacks: [{main: [spare, last]}]}\n",
        {
            "main": (Fault("context", 8, 1), Fault("content", 8, 3), Fault("500", 8, 5)),
            "spare": (Fault("500", 16, 5),),
        },
    ),
    LitellmFile(
        "deployments in order",
        models(
            openai("main1", more="order: 1"),
            openai("main2", more="order: 1"),
            openai("later", "main", "order: 2"),
            openai("spare"),
        )
        + "router_settings: {num_retries: 1, fallbacks: [{main: [spare]}]}\n",
        {
            "main1": (Fault("500", 8, 1), Fault("500", 8, 4, times=1), Fault("429", 50, 18, times=1)),
            "main2": (Fault("500", 8, 1),),
            "later": (Fault("500", 16, 1),),
        },
    ),
    LitellmFile(
        "fallbacks of fallbacks, and default ones",
        models(openai("main"), openai("second"), openai("third"), openai("other"), openai("spare"))
        + "litellm_settings: {num_retries: 0, default_fallbacks: [spare], "
        "fallbacks: [{main: [second]}, {second: [third]}]}\n",
        {
            "main": (Fault("500", 6, 0), Fault("500", 6, 3)),
            "second": (Fault("500", 12, 6),),
            "other": (Fault("500", 7, 1),),
        },
        models=("main", "other", "main"),
    ),
    LitellmFile(
        "two providers of one name, by weight",
        models(openai("main1", more="weight: 3"), anthropic("main2", more="weight: 1"), openai("spare"))
        + "litellm_settings: {drop_params: true}\nrouter_settings: {num_retries: 2, fallbacks: [{main: [spare]}]}\n",
        {
            "main1": (Fault("500", 20, 3, times=1), Fault("500", 20, 9)),
            "main2": (Fault("500", 20, 3, times=1), Fault("500", 20, 9)),
        },
        spread={"main1": 0.75, "main2": 0.25},
    ),
    LitellmFile(
        "context windows are checked before",
        models(openai("main", info="max_input_tokens: 2000"), openai("long", info="max_input_tokens: 100000"))
        + "router_settings: {enable_pre_call_checks: true, context_window_fallbacks: [{main: [long]}]}\n",
        {"main": (Fault("500", 10, 1, times=1),)},
        long=4,
    ),
    LitellmFile(
        "limits of time, and a limit of requests",
        models(
            openai("main1", more="timeout: 5, max_parallel_requests: 20"),
            openai("main2", more="timeout: 5, max_parallel_requests: 20"),
            openai("spare", more="rpm: 100000, tpm: 100000000"),
        )
        + "router_settings: {num_retries: 1, fallbacks: [{main: [spare]}], allowed_fails: 100, cooldown_time: 1}\n",
        {name: (Fault("hang", 100, 97), Fault("slow", seconds=0.05)) for name in ("main1", "main2")},
        concurrent=12,
    ),
    LitellmFile(
        "names, a key, a cache, other strategies",
        models(
            openai("main1", "My Model"),
            openai("main2", "My Model"),
            openai("spare"),
            "  - model_name: '*'\n    litellm_params: {model: openai/*, api_base: 'http://127.0.0.1:@any/v1', "
            "api_key: os.environ/OPENAI_API_KEY}\n",
        )
        + f"general_settings: {{master_key: {MASTER_KEY}}}\n"
        "litellm_settings: {cache: true, cache_params: {type: local, ttl: 600}, num_retries: 2}\n"
        "router_settings: {routing_strategy: latency-based-routing, fallbacks: [{My Model: [spare]}], "
        "model_group_alias: {gpt-4: My Model}}\n",
        {
            "main1": (Fault("500", 24, 4), Fault("500", 24, 8, times=1)),
            "main2": (Fault("500", 24, 4), Fault("500", 24, 8, times=1)),
        },
        models=("My Model", "gpt-4", "My Model", "unheard-of"),
    ),
)
