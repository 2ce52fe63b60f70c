"""Adds the commands of the lab to `firsttoken`: the entry point `firsttoken.commands` of pyproject.toml."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from gateway.cli.arguments import ADMIN, COUNT, FILES, PORT, WORKERS, WORKERS_HELP, AddCommand, positive, with_scheme


def add_commands(command: AddCommand) -> None:
    """`command` adds one command, whose modules are imported when the command runs."""
    replay = "try a configuration on recorded traffic, in virtual time"
    _add_replay(command("replay", replay, "lab.replay.replay_command:replay"))
    capacity = "how many engines recorded traffic takes, by replays"
    _add_capacity(command("capacity", capacity, "lab.capacity.capacity_command:capacity"))
    autoscale = "how many engines the traffic of a running gateway takes, for KEDA"
    _add_autoscale(command("autoscale", autoscale, "lab.autoscale.autoscale_command:autoscale"))
    demo = "simulated engines, gateway, traffic and a live table: no GPU, no key"
    _add_demo(command("demo", demo, "lab.demo.demo:demo"))
    simulate = "run a simulated engine with the API of vLLM"
    _add_simulate(command("simulate", simulate, "lab.servers.simulate:simulate"))


def _add_replay(replay: ArgumentParser) -> None:
    add = replay.add_argument
    formats = "Mooncake JSON lines, an Azure CSV, our own access log or records, recorded sessions, or synthetic:agents"
    add("traces", metavar="[ROUTE=]TRACE", nargs="+", help=formats)
    add("--config", dest="files", help="the policy to try, with --live the budgets (default: none)", **FILES)
    add("--config-b", dest="files_b", help="another one (default: none)", **FILES)
    add("--load", default="1", help="multiple of the rate of the trace: 1, 0.6,1,1.4 or 0.6..1.4")
    add("--seed", type=COUNT, default=0, help="seed of the first replay")
    add("--seeds", type=COUNT, default=1, metavar="K", help="number of seeds, from --seed on")
    add("--limit", type=COUNT, metavar="N", help="only the first requests of each trace (default: all)")
    add("--seconds", type=positive, metavar="S", help="only the first seconds of the replay (default: all)")
    add("--closed", action="store_true", help="a turn of a session comes its think time after the answer before")
    add("--sessions", type=positive, default=0.1, metavar="RATE", help="new sessions/s of recorded sessions")
    scoring = (
        "score by TTFT budgets with this much per 1,000 new prompt tokens, 0ms: fixed (default: as the routes say)"
    )
    add("--score-per-1k", metavar="TIME", help=scoring)
    add("--scorers", default="all", help="baselines, separated by commas; all, or none")
    add("--no-reference", action="store_true", help="without the clairvoyant reference")
    add("--workers", type=WORKERS, metavar="N", help=WORKERS_HELP)
    add("--replicas", type=WORKERS, metavar="N", help="gateways that share state over Redis (default: 1)")
    add("--news", default="2ms", metavar="TIME", help="delay of updates between replicas, or off")
    changes = "POOL+N engines, ROUTE.ttft=TIME, ROUTE.first=POOL or ROUTE.repair=CLASS, each as a row (default: none)"
    add("--what-if", nargs="+", action="extend", default=[], metavar="CHANGE", help=changes)
    add("--html", type=Path, metavar="FILE", help="write the report with plots into one file (default: none)")
    add("--worst", type=COUNT, default=0, metavar="N", help="show the decisions with the most regret")
    faults = "slow:FACTOR, kill or restart, such as main/h1:8000@90s=slow:5 (default: none)"
    add("--fault", nargs="+", action="extend", default=[], metavar="ENDPOINT@TIME=WHAT", help=faults)
    add("--json", action="store_true", help="print every replay as JSON")
    _add_live(replay)


def _add_capacity(capacity: ArgumentParser) -> None:
    add = capacity.add_argument
    add("traces", metavar="[ROUTE=]TRACE", nargs="+", help="as of replay")
    add("--config", dest="files", required=True, help="routes with budgets, and the engines (required)", **FILES)
    add("--pool", metavar="NAME", help="pool whose engines are counted (default: the only one of engines)")
    add("--engines", metavar="LOW..HIGH", help="numbers to try (default: 1 to twice the present number)")
    add("--load", type=positive, default=1.0, help="multiple of the rate of the trace")
    add("--seed", type=COUNT, default=0, help="seed of the replays")
    add("--limit", type=COUNT, metavar="N", help="only the first requests of each trace (default: all)")
    add("--seconds", type=positive, metavar="S", help="only the first seconds of the trace (default: all)")
    add("--sessions", type=positive, default=0.1, metavar="RATE", help="new sessions/s of recorded sessions")
    add("--no-load", action="store_true", help="without the load that the present engines carry")
    add("--json", action="store_true", help="print the figures as JSON")


def _add_autoscale(autoscale: ArgumentParser) -> None:
    add = autoscale.add_argument
    add("--config", dest="files", required=True, help="the gateway's configuration (required)", **FILES)
    add("--admin", type=with_scheme, default=ADMIN, metavar="URL", help="admin port of the gateway")
    add("--listen", default="127.0.0.1:9003", metavar="HOST:PORT", help="port of KEDA's external scaler")
    bounds = "pool of engines, at least MIN and at most MAX, each serving after START (default: 2m); one for each pool"
    name = "NAME=MIN..MAX[@START]"
    add("--pool", dest="pools", action="append", required=True, metavar=name, help=f"{bounds} (required)")


def _add_live(replay: ArgumentParser) -> None:
    """Options of a replay in real time."""
    add = replay.add_argument
    there = "send the trace there, to an OpenAI-compatible API (default: none, virtual time)"
    add("--live", type=with_scheme, metavar="URL", help=there)
    add(
        "--ttft",
        metavar="TIME",
        help="with --live: TTFT budget of all routes, as 800ms (default: as in --config)",
    )
    add("--speed", type=positive, metavar="X", help="with --live: times as fast as recorded (default: 1)")
    add("--model", metavar="NAME", help="with --live: model to ask for (default: the route)")
    key = replay.add_mutually_exclusive_group().add_argument
    key("--key", metavar="KEY", help="with --live: API key, which other users of this machine may see (default: none)")
    key("--key-env", metavar="NAME", help="with --live: variable with the API key (default: none)")
    add("--timeout", type=positive, metavar="S", help="with --live: of one request (default: 300)")


def _add_demo(demo: ArgumentParser) -> None:
    demo.add_argument("--port", type=PORT, default=8080, help="of the gateway")
    demo.add_argument("--admin-port", type=PORT, default=9090, help="of its admin server")
    demo.add_argument("--incident", metavar="NAME", help="play one, and show its cause (default: traffic of all kinds)")
    demo.add_argument("--seconds", type=positive, help="end after this time (default: at a signal)")


def _add_simulate(simulate: ArgumentParser) -> None:
    simulate.add_argument("--profile", required=True, help="what it simulates, such as 8b-h100 (required)")
    simulate.add_argument("--port", type=PORT, required=True, help="0 takes any free one (required)")
    simulate.add_argument("--host", default="127.0.0.1", help="address to listen on")
    simulate.add_argument("--model", help="the name of the model it serves (default: that of the profile)")
    simulate.add_argument("--speed", type=positive, default=1.0, help="2 is twice as fast as the real engine")
