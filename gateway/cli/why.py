"""`firsttoken why`: the cause of a slow request, or of a route's missed budgets, on one screen.

Everything comes from the admin port of a running gateway, or from its records on disk: the diagnosis is made there, at
the end of the request.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from textwrap import wrap
from time import localtime, strftime
from typing import Any
from urllib.parse import quote, urlencode

from gateway.cli.gateway_client import Gone, ask, ask_admin
from gateway.cli.records_command import stored_causes, stored_incidents, stored_request
from gateway.cli.tables import aligned, bars, printable, shortened, wrapped
from gateway.config.config_errors import ConfigError

WIDTH = 80  # columns
BAR = 18  # of the longest bar
NAME = 34  # characters of an endpoint's name
INCIDENTS = 5  # on a screen


def why(args: argparse.Namespace) -> int:
    """`args`: request_id, or route and last (minutes); admin or records, json. Raises ConfigError."""
    if (args.request_id is None) == (args.route is None):
        raise ConfigError(["firsttoken: name a REQUEST_ID, or --route with --last (see firsttoken why --help)"])
    if args.request_id is None:
        found = {**_causes(args), "incidents": _incidents(args)}
        print(json.dumps(found, indent=2) if args.json else route_screen(args.route, args.last, found))
        return 0
    record = _request(args)
    print(json.dumps(record, indent=2) if args.json else request_screen(record))
    return 0


def _causes(args: argparse.Namespace) -> Mapping[str, Any]:
    if args.records is not None:
        return stored_causes(args.records, args.route, args.last)
    found: Mapping[str, Any]
    found = ask_admin(args.admin, "/causes?" + urlencode({"route": args.route, "minutes": args.last}))
    return found


def _incidents(args: argparse.Namespace) -> Sequence[Mapping[str, Any]]:
    """Of the route, the worst first; none from a gateway of an older version."""
    if args.records is not None:
        return stored_incidents(args.records, args.route, args.last)
    try:
        found = ask(args.admin, f"/incidents?minutes={args.last}")
    except Gone:
        return []
    return [each for each in found["incidents"] if each["route"] == args.route]


def _request(args: argparse.Namespace) -> Mapping[str, Any]:
    if args.records is not None:
        return stored_request(args.records, args.request_id)
    records = ask_admin(args.admin, f"/requests?id={quote(args.request_id, safe='')}")
    if not records:
        told = "it is in progress, too old, or of another gateway; records on disk or the access log may have it"
        raise ConfigError([f"{args.admin}: no recent request has the id {args.request_id}: {told}"])
    record: Mapping[str, Any] = records[-1]
    return record


# -- one request ---------------------------------------------------------------------------


def request_screen(record: Mapping[str, Any]) -> str:
    found = record.get("why")
    lines = [*_summary(record), "", *_stages(record, found)]
    if found is not None and found["candidates"]:
        lines += ["", *_candidates(found["candidates"], record["endpoint"])]
    if attempts := record["attempts"]:
        lines += ["", "attempts", *(line for each in attempts for line in _attempt(each))]
    lines += ["", *_verdict(found)]
    return "\n".join(printable(line[:WIDTH]) for line in lines)


def _summary(record: Mapping[str, Any]) -> list[str]:
    at = strftime("%H:%M:%S", localtime(record["wall"]))
    first, budget = record["ttft_ms"], record["ttft_budget_ms"]
    came = "no first token" if first is None else f"first token after {_ms(first)}"
    promised = "" if budget is None else f", budget {_ms(budget)}"
    lines = [
        f"{record['request_id']}  {at}  route {record['route']}  caller {record['tenant']}",
        f"{record['end']} {record['status']}  at {_short(record['endpoint'])}  {came}{promised}",
    ]
    if (p50 := record["ttft_predicted_p50_ms"]) is not None:
        lines.append(f"forecast of the first token: p50 {_ms(p50)}, p90 {_ms(record['ttft_predicted_p90_ms'])}")
    if (p50 := record.get("total_predicted_p50_ms")) is not None:
        forecast = f"p50 {_ms(p50)}, p90 {_ms(record['total_predicted_p90_ms'])}"
        lines.append(f"forecast of the whole answer: {forecast}; it took {_ms(record['total_ms'])}")
    prompt = record["prompt_tokens_reported"] or record["prompt_tokens_estimated"]
    if prompt is not None:
        hit, forecast = record["cached_tokens_reported"], record["cached_tokens_predicted"]
        told = f"{hit if hit is not None else '?'} cached, {forecast if forecast is not None else '?'} forecast"
        effort = f"; reasoning effort {record['reasoning_effort']}" if record.get("reasoning_effort") else ""
        lines.append(f"prompt {prompt} tokens: {told}; answer {record['output_tokens'] or 0} tokens{effort}")
    return [line for text in lines for line in _wrapped(text)]


def _stages(record: Mapping[str, Any], found: Mapping[str, Any] | None) -> list[str]:
    """A bar for each stage of at least a tenth of a millisecond, beside its usual values."""
    usual = {} if found is None else found["usual_ms"]
    stages = [(name, spent) for name, spent in record["stages_ms"].items() if spent >= 0.1]
    if not stages:
        return []
    drawn = bars([(name, spent, "") for name, spent in stages], BAR)
    rows = [("stage", "took", "usual here: p50", "p90")]
    for (name, spent), bar in zip(stages, drawn, strict=True):
        p50, p90 = map(_ms, usual[name]) if name in usual else ("–", "–")
        rows.append((bar.rstrip(), _ms(spent), p50, p90))
    if found is not None and not usual:
        rows[0] = ("stage", "took", "usual here: not known yet", "")
    return [*aligned(rows, left={0}), *_reply(record)]


def _reply(record: Mapping[str, Any]) -> list[str]:
    """The parts of `upstream`: a server that sends the head of its reply at once has the request, and computes."""
    upstream, head, byte = record["stages_ms"].get("upstream"), record.get("head_ms"), record.get("first_byte_ms")
    if upstream is None or head is None or byte is None or record["ttft_ms"] is None:
        return []
    first = record["ttft_ms"] - record["stages_ms"].get("relay", 0.0)
    parts = max(head - first + upstream, 0.0), max(byte - head, 0.0), max(first - byte, 0.0)
    sent, after, last = map(_ms, parts)
    return _wrapped(f"upstream: head of the reply {sent}, then first byte {after}, then first token {last}")


def _candidates(candidates: Sequence[Mapping[str, Any]], went: str) -> list[str]:
    rows = [("decided among", "p50", "p90", "hit", "ahead", "price")]
    for each in candidates:
        mark = "* " if each["endpoint"] == went else "  "
        times = _ms(each["ttft_p50_ms"]), _ms(each["ttft_p90_ms"])
        tokens = str(each["hit_tokens"]), str(each["tokens_ahead"])
        rows.append((mark + _short(each["endpoint"]), *times, *tokens, f"${each['price_usd']:.4f}"))
    return aligned(rows, left={0})


def _attempt(attempt: Mapping[str, Any]) -> list[str]:
    times = f"{_ms(attempt['opened_ms'])} to {_ms(attempt['ended_ms'])}"
    status = attempt["status"] or "no reply"
    told = f"{attempt['number']} {attempt['kind']} {_short(attempt['endpoint'])} {times}: {attempt['ending']}, {status}"
    return _wrapped(told + (f", {attempt['cause']}" if attempt["cause"] else ""), "  ")


def _verdict(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return ["cause  none: the request met its budgets"]
    if found.get("failed"):
        told = f"failed after {_ms(found['over_ms'])}"
    else:
        told = f"{_ms(found['over_ms'])} over" + (f", most in {found['part']}" if found["part"] else "")
    lines = [f"cause  {found['cause']} ({told})"]
    if found.get("culprit"):
        lines.append(f"by     {_short(found['culprit'])}")
    return lines + _labelled("seen   ", found["evidence"]) + _labelled("mend   ", found["mend"])


# -- a route -------------------------------------------------------------------------------


def route_screen(route: str, last: int, found: Mapping[str, Any]) -> str:
    """Incidents, failures first, then causes by the time that they cost, against the window before."""
    now, before = found["now"], found["before"]
    slow, slow_before = (sum(each["requests"] for each in window["causes"].values()) for window in (now, before))
    lines = [
        f"route {route}, the last {last} min: {slow} of {now['requests']} requests missed a budget or failed",
        f"the {last} min before: {slow_before} of {before['requests']}",
    ]
    for each in found.get("incidents", ())[:INCIDENTS]:
        lines += ["", *_incident(each)]
    causes = sorted({*now["causes"], *before["causes"]}, key=lambda cause: -_of(now, cause)[1])
    if causes:
        rows = [("cause", "requests", "time over", "before", "time over")]
        for cause in causes:
            (number, over), (number_before, over_before) = _of(now, cause), _of(before, cause)
            rows.append((cause, f"{number:.0f}", _ms(over), f"{number_before:.0f}", _ms(over_before)))
        lines += ["", *aligned(rows, left={0})]
    if slow:
        lines += ["", *_wrapped("single requests: /requests?slow=1, then firsttoken why REQUEST_ID")]
    return "\n".join(lines)


def _incident(each: Mapping[str, Any]) -> list[str]:
    when = " to ".join(strftime("%H:%M:%S", localtime(each[name])) for name in ("since", "last"))
    lines = _wrapped(f"{each['headline']}, {each['cause']}, {when}")
    return lines + _labelled("  seen  ", each["evidence"]) + _labelled("  mend  ", each["mend"])


def _of(window: Mapping[str, Any], cause: str) -> tuple[float, float]:
    found = window["causes"].get(cause, {"requests": 0, "over_ms": 0.0})
    return found["requests"], found["over_ms"]


def _ms(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1e3:,.1f} s"
    return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"


def _short(name: str) -> str:
    return shortened(name, NAME)


def _labelled(label: str, text: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return wrapped(text, WIDTH, indent)
