"""Metrics of prompts: parts, sessions, and prefixes that break."""

from __future__ import annotations

from gateway.observe.metrics.metric_family import counter, histogram

STEP_BOUNDS = (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0, 89.0)
PAUSE_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
KEPT_BOUNDS = tuple(i / 10 for i in range(11))

PROMPTS = (
    counter(
        "firsttoken_prefix_breaks_total{route,class} breaks",
        help="Prompts that depart from the one before, although the text behind is the same, by what changed",
        more="The classes are those of [prefix-doctor.md](prefix-doctor.md). Only answered requests are compared.",
        moves="A time, an id or a counter early in prompts; tools in another order; a history that is cut.",
        act="`firsttoken advise` ranks the places by cost, with a mend for each.",
    ),
    counter(
        "firsttoken_prompt_part_tokens_total{route,part} tokens",
        help="Tokens of prompts by part",
        more="`part`: system, tools, history, tool_results, last_turn or images. They add up to the prompts.",
        moves="Longer system prompts, more tools, longer conversations and results of tools.",
        act="A part that grows from week to week: `firsttoken advise` compares the weeks.",
    ),
    counter(
        "firsttoken_repaired_total{route,rule} requests",
        help="Requests whose prompt was changed by a rule, so that its prefix stays the same",
        more="`rule`: as in `routes.R.repair`; `strip_cch` also where Claude Code's line is left out unasked.",
        moves="Callers with such prompts, and the rules of the route.",
        act="No action: what the rules do. `firsttoken advise` tells what they save.",
    ),
    histogram(
        "firsttoken_session_steps{route} steps",
        STEP_BOUNDS,
        help="Number of each answered prompt within its session",
        more=(
            "A session is a conversation, as the client names it, else by its first message. The bucket of 1 counts "
            "sessions that began: all steps over these are the steps of a session. Prompts of 128 tokens or more."
        ),
        moves="Agents that take more steps for a task.",
        act="More steps at the same TTFT make a task slower: a budget for the step, or steps in parallel.",
    ),
    histogram(
        "firsttoken_session_pause_seconds{route}",
        PAUSE_BOUNDS,
        help="End of a step of a session to the arrival of its next step",
        more="The time of tools, and of people who read.",
        moves="Slow tools, and people.",
        act="Longer than engines keep a prefix: more KV cache, or an offload of it.",
    ),
    histogram(
        "firsttoken_session_kept_ratio{route}",
        KEPT_BOUNDS,
        help="Share of the prompt before, of the same session, with which a prompt begins",
        more="1: nothing was changed, and the engine may find all of it in its cache.",
        moves="Prompts that change early: a time, tools in another order, a history that is cut.",
        act="Below 1: `firsttoken advise` names the place, what changed there, and the cost.",
    ),
)
