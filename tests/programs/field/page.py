"""Writes what a run of the bench has found as a page of tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import UTC, datetime

from tests.programs.field.bench import ANSWER, HELD, LOST, MEANS, MENDED, NAMED, REFUSED, TRANSLATED, Results
from tests.programs.field.shares import Found, Plan

_CLASSES = {
    REFUSED: "the API refused what the gateway wrote or could have left out",
    LOST: "state that its maker would have accepted did not come back",
    NAMED: "the route lacks what is meant",
    HELD: "the gateway refused what the API takes",
    ANSWER: "the answer differs from what the model said",
    MENDED: "the API refused, the gateway mended and asked again",
    MEANS: "the API refused what no gateway can leave out",
}


def page(plan: Plan, carried: Found, rows: int) -> str:
    """Markdown. `rows`: most of a table."""
    found, long, conversations = carried.short, carried.long, plan.conversations
    command = f"python -m tests.programs.field --conversations {conversations} --sessions {plan.sessions}"
    command += f" --{plan.route}" * (plan.route != "spare")
    command += " --plain" * (not plan.odd)
    command += f" --without-facts --callers {plan.callers}" * plan.without_facts
    asked, steps = sum(found.requests.values()), sum(long.requests.values())
    refused = sum(count for (_, form), count in long.classes.items() if form == REFUSED)
    lines = [
        "# The field",
        f"Written by `{command}`, {datetime.now(UTC):%Y-%m-%d}: {conversations} conversations before "
        f"{len(found.requests)} APIs, {asked} requests.",
        "Conversations and APIs with a request that was refused for a member, a form or an order: "
        f"{len(found.broken)} of {conversations * len(found.requests)}.",
        _summary(found),
        *([f"## Lost before a lesson held\n\n{_lost(found)}"] if plan.without_facts else []),
        f"Sessions with changes of the model: {refused} of {steps} steps refused, {long.total(NAMED)} refused by "
        f"name of what the route lacks, {carried.unanswered} others without an answer, {long.total(LOST)} blocks lost.",
        *(f"## {form.capitalize()}: {words}\n\n{_kinds(found, form, rows)}" for form, words in _CLASSES.items()),
        f"## Sessions\n\n{_kinds(long, None, 60)}",
    ]
    return "\n\n".join(lines)


def _summary(found: Results) -> str:
    lines = [
        "| API | requests | refused | of these translated | for its meaning | by the gateway | mended "
        "| answers altered | state lost |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for api, asked in sorted(found.requests.items(), key=lambda each: -found.classes[each[0], REFUSED]):
        of_class = [found.classes[api, form] for form in (REFUSED, TRANSLATED, MEANS)]
        kinds = [_number(found, api, form) for form in (NAMED, ANSWER, LOST)]
        cells = [*of_class, kinds[0], found.classes[api, MENDED], *kinds[1:]]
        lines.append(f"| {api} | {asked} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _lost(found: Results) -> str:
    """Requests of callers by the form of the refusal, with the pools that lost more than two by one kind."""
    forms: Counter[str] = Counter()
    for (_, form, _), count in found.lost.items():
        forms[form] += count
    totals = ", ".join(f"{form} {count}" for form, count in forms.most_common()) or "none"
    pools = {pool for pool, _, _ in found.lost}
    lines = [
        f"{sum(forms.values())} requests ({totals}), of {len(pools)} pools; kinds of refusals by pool: "
        f"{len(found.lost)}, with more than two: {sum(count > 2 for count in found.lost.values())}.",
        "",
        "| requests | pool | form | kind |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {count} | {pool} | {form} | {_cell(kind)} |" for (pool, form, kind), count in found.lost.most_common(80)
    ]
    return "\n".join(lines)


def _number(found: Results, api: str, form: str) -> int:
    return sum(count for (name, kind, _), count in found.counts.items() if (name, kind) == (api, form))


def _kinds(found: Results, form: str | None, most: int) -> str:
    """Rows of a class, most frequent first; None: of all."""
    totals: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for (api, of, kind), count in found.counts.items():
        if form in (None, of):
            totals[of, kind][api] += count
    lines = ["| requests | translated | kind | at | shortest example |", "|---|---|---|---|---|"]
    rows = sorted(totals.items(), key=lambda row: -row[1].total())
    for (of, kind), apis in rows[:most]:
        example = min((found.examples[api, of, kind] for api in apis), key=len)
        places = ", ".join(f"{api} {count}" for api, count in apis.most_common())
        shown = kind if form else f"{of}: {kind}"
        translated = sum(found.translated[api, kind] for api in apis) if of == REFUSED else ""
        lines.append(f"| {apis.total()} | {translated} | {_cell(shown)} | {places} | `{_cell(example[:240])}` |")
    if len(rows) > most:
        lines.append(f"| | | {len(rows) - most} kinds more | | |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("`", "'").replace("\n", " ")
