"""The commands. Exit codes: 0 success, 2 invalid input or configuration, 1 internal error.

A command imports its modules when it runs, so `--help` and `check` start at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.cli.arguments import (
    ADMIN,
    COUNT,
    EXPORTS,
    FILE_LIST,
    FILES,
    ORDERS,
    PORT,
    WINDOWS,
    WORKERS,
    WORKERS_HELP,
    AddCommand,
    CommandParser,
    address,
    data_address,
    log_or_address,
    period,
    positive,
    window,
)
from gateway.config.config_errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from gateway.config.models import Config

PLUGINS = "firsttoken.commands"  # group of entry points of other packages that add commands
FROM_ENVIRONMENT = "merged in this order (default: API keys in the environment)"
FROM_MACHINE = "merged in this order (default: the servers that `up` finds)"


Plugin = Callable[[AddCommand], None]


def main(argv: Sequence[str] | None = None, plugins: Iterable[Plugin] | None = None) -> int:
    """`plugins`: functions that add commands; None: the entry points of installed packages."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(arguments, _installed_plugins() if plugins is None else plugins)
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse: help was shown, or the arguments are wrong
        return int(stop.code or 0)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # the reader of a pipe has seen enough
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("FIRSTTOKEN_DEBUG") == "1":
            raise
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(f"firsttoken: internal error: {text} (our fault; please report)", file=sys.stderr)
        return 1


def _parse(arguments: list[str], plugins: Iterable[Plugin]) -> argparse.Namespace:
    """Asks plugins only where the command is none of the gateway's: a gateway that serves imports none."""
    parser = CommandParser("firsttoken", description="A latency-aware LLM routing gateway.")
    parser.set_defaults(run=None)
    parser.add_argument("--version", dest="run", action="store_const", const=_version, help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=CommandParser)

    def command(name: str, text: str, function: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=lambda args: _imported(function)(args))
        return added

    _add_commands(command)
    if not arguments or arguments[0] not in commands.choices:
        for add_commands in plugins:
            add_commands(command)
    known = tuple(commands.choices)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in known:
        parser.error(f"no command '{arguments[0]}'{did_you_mean(arguments[0], known)}")
    args = parser.parse_args(arguments)
    if args.run is None:
        parser.error(f"name a command: {', '.join(known)}")
    return args


def _installed_plugins() -> Iterator[Plugin]:
    from importlib.metadata import entry_points

    for plugin in entry_points(group=PLUGINS):
        yield partial(_add_installed, plugin)


def _add_installed(plugin: EntryPoint, command: AddCommand) -> None:
    """A plugin that fails adds no command, and takes none from the gateway."""
    try:
        plugin.load()(command)
    except Exception as error:
        print(f"firsttoken: the plugin {plugin.value} adds no command: {error}", file=sys.stderr)


def _imported(function: str) -> Callable[[argparse.Namespace], int]:
    """`function`: MODULE:FUNCTION."""
    module, _, name = function.partition(":")
    called: Callable[[argparse.Namespace], int] = getattr(import_module(module), name)
    return called


def _add_commands(command: AddCommand) -> None:
    _add_up(command("up", "find model servers and API keys on this machine, and serve them", "gateway.cli.up.up:up"))
    serve = command("serve", "run the gateway; without a file, of the servers that `up` finds", f"{__name__}:serve")
    _add_files(serve, FROM_MACHINE)
    _add_ports(serve)
    serve.add_argument("--workers", type=WORKERS, metavar="N", help=WORKERS_HELP)
    serve.set_defaults(picker=False)
    pick = command("pick", "run the gateway with an endpoint picker for Envoy", f"{__name__}:serve")
    _add_files(pick, "merged in this order")
    _add_ports(pick)
    pick.add_argument("--workers", type=WORKERS, metavar="N", help=WORKERS_HELP)
    pick.set_defaults(picker=True)
    check = command("check", "validate a configuration without starting anything", "gateway.cli.config_commands:check")
    _add_files(check, FROM_ENVIRONMENT)
    check.add_argument("--no-secrets", action="store_true", help="check files whose variables are not set here")
    check.add_argument("--live", action="store_true", help="ask every endpoint for its models and one token too")
    check.add_argument("--no-tokens", action="store_true", help="with --live: ask for nothing that costs anything")
    check.add_argument("--timeout", type=positive, metavar="S", help="with --live: of one request (default: 10)")
    measure = "measure a pool's TTFT and TPOT by prompt size, for the gateway to begin with"
    _add_probe(command("probe", measure, "gateway.cli.live.probe:probe"))
    explain = command("explain", "where a request would go, and why; nothing is sent", "gateway.cli.explain:explain")
    explain.add_argument("request", metavar="REQUEST.json", type=Path, nargs="?", help="the body of a request")
    explain.add_argument("--config", dest="files", help=FROM_ENVIRONMENT, **FILES)
    explain.add_argument("--route", metavar="NAME", help="route (default: the model in the request)")
    running = "ask a running gateway, by its admin port (default: none, decide here)"
    explain.add_argument("--admin", type=address, metavar="URL", help=running)
    explain.add_argument(
        "--key-env", metavar="NAME", help="with --admin: the variable with the API key to ask as (default: none)"
    )
    explain.add_argument("--json", action="store_true", help="print the reply of POST /explain")
    _add_agents(command("agents", "the settings of a coding agent, to paste", "gateway.cli.agents.command:agents"))
    keys = "stored keys of callers: add, revoke, list"
    _add_keys(command("keys", keys, "gateway.cli.config_commands:keys"))
    believed = "what is believed of a model and whence; newer facts in place of the release's: show, update"
    _add_facts(command("facts", believed, "gateway.cli.facts_command:facts"))
    top = command("top", "live view of a running gateway: routes, endpoints, slowest requests", "gateway.cli.top:top")
    top.add_argument("--admin", type=address, metavar="URL", default=ADMIN, help="its admin port")
    top.add_argument("--interval", type=positive, default=2.0, metavar="S", help="seconds between two polls")
    top.add_argument("--once", action="store_true", help="print one frame")
    top.add_argument("--sort", choices=ORDERS, default=ORDERS[0], help=f"order of the tables: {', '.join(ORDERS)}")
    top.add_argument(
        "--filter", metavar="TEXT", default="", help="text in names of routes and endpoints (default: all)"
    )
    top.add_argument("--window", choices=WINDOWS, default=WINDOWS[0], help=f"of the figures: {', '.join(WINDOWS)}")
    why = command("why", "the cause of a slow request, or of a route's missed budgets", "gateway.cli.why:why")
    why.add_argument("request_id", metavar="REQUEST_ID", nargs="?", help="`x-request-id` of the answer")
    why.add_argument("--route", metavar="NAME", help="all slow requests of a route, by cause (default: none)")
    why.add_argument("--last", type=window, default=15, metavar="TIME", help="with --route: 1m to 60m (default: 15m)")
    why.add_argument("--admin", type=address, metavar="URL", default=ADMIN, help="admin port of the gateway")
    why.add_argument("--records", metavar="DIR", type=Path, help="ask a directory of records (default: the gateway)")
    why.add_argument("--json", action="store_true", help="print the reply of the gateway")
    taking_out = "take an endpoint out of a running gateway, and wait until no request is left there"
    drain = command("drain", taking_out, "gateway.cli.drain:drain")
    drain.add_argument("endpoint", metavar="ENDPOINT", help="its id in GET /fleet, as small/10.0.0.11:8000")
    drain.add_argument("--ready", action="store_true", help="have it take requests again")
    drain.add_argument("--admin", type=address, metavar="URL", default=ADMIN, help="admin port of the gateway")
    text = "a report: what breaks prefixes, and how prompts grow, with costs and mends"
    advise = command("advise", text, "gateway.cli.advise.advise:advise")
    admin = "admin port of a running gateway"
    advise.add_argument("--admin", dest="source", type=address, metavar="URL", default=ADMIN, help=admin)
    log = "an access log in its place (default: none)"
    advise.add_argument("--from", dest="source", type=log_or_address, metavar="LOG", help=log)
    advise.add_argument("--html", type=Path, metavar="FILE", help="write it as one page, with plots (default: none)")
    without = "with a log: write the same log without the breaks, for a replay beside it (default: none)"
    advise.add_argument("--mended", type=Path, metavar="FILE", help=without)
    advise.add_argument("--json", action="store_true", help="print the sums that the report is made of")
    records = command("records", "print stored Records as JSON lines", "gateway.cli.records_command:records")
    records.add_argument("folder", metavar="DIR", type=Path, help="records.dir of the configuration")
    records.add_argument("--last", type=period, metavar="TIME", help="arrived within 15m, 6h or 7d (default: all)")
    records.add_argument("--route", metavar="NAME", help="of one route (default: all)")
    records.add_argument("--slow", action="store_true", help="only those that missed a budget or failed")
    importing = "gateway.cli.importing.import_command:run_import"
    _add_import(command("import", "write a configuration of ours from another gateway's", importing))
    command("schema", "print the JSON Schema of the configuration", "gateway.cli.config_commands:schema")
    files = "write files for Grafana, Prometheus, proxies, Kubernetes or systemd into a folder"
    _add_export(command("export", files, "gateway.cli.export:export"))


def _add_files(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("files", help=text, **FILE_LIST)
    command.add_argument("--config", dest="files", help="the same (default: none)", **FILES)


def _add_ports(command: argparse.ArgumentParser) -> None:
    command.add_argument("--port", type=PORT, metavar="N", help="data port (default: as in the file, or 8080)")
    command.add_argument("--admin-port", type=PORT, metavar="N", help="admin port (default: as in the file, or 9090)")
    local = "without a file: ports of this machine to ask, as 8000,11434, or none (default: those of model servers)"
    command.add_argument("--local", type=_ports, metavar="PORTS", help=local)


def _add_probe(probe: argparse.ArgumentParser) -> None:
    probe.add_argument("pool", metavar="POOL", help="name of the pool")
    probe.add_argument("--config", dest="files", help=FROM_ENVIRONMENT, **FILES)
    tokens = probe.add_mutually_exclusive_group()
    yes, no = "send the requests, whatever they cost", "print what would be sent, and its price"
    tokens.add_argument("--tokens", action="store_true", default=None, help=yes)
    tokens.add_argument("--no-tokens", dest="tokens", action="store_false", default=None, help=no)
    probe.add_argument("--timeout", type=positive, default=120.0, metavar="S", help="of one request")


def _add_up(up: argparse.ArgumentParser) -> None:
    _add_ports(up)
    up.add_argument("--write", action="store_true", help="write firsttoken.yaml; never over an existing file")
    tokens = up.add_mutually_exclusive_group()
    yes, no = "time first tokens of APIs too, unasked: they cost", "send no prompt to any server"
    tokens.add_argument("--tokens", action="store_true", default=None, help=yes)
    tokens.add_argument("--no-tokens", dest="tokens", action="store_false", default=None, help=no)


def _add_agents(agents: argparse.ArgumentParser) -> None:
    agents.add_argument("agent", metavar="AGENT", nargs="?", help="such as claude-code (default: list their names)")
    agents.add_argument("--admin", type=address, metavar="URL", help="admin port of the gateway (default: see --url)")
    url = "its data port, as agents reach it (default: as --admin tells, or http://127.0.0.1:8080)"
    agents.add_argument("--url", type=data_address, metavar="URL", help=url)
    agents.add_argument("--key-env", metavar="NAME", help="the variable with a key to ask its models (default: none)")
    agents.add_argument("--model", metavar="NAME", help="the model to use (default: the first of its list)")
    agents.add_argument("--small-model", metavar="NAME", help="for titles and summaries (default: the same)")


def _ports(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(map(PORT, text.split(",")))


def _add_keys(keys: argparse.ArgumentParser) -> None:
    actions = keys.add_subparsers(metavar="ACTION", dest="action", required=True, parser_class=CommandParser)
    texts = {"add": "make a key and print it, once", "revoke": "revoke a key", "list": "list all keys"}
    for name, text in texts.items():
        action = actions.add_parser(name, help=text, description=text)
        if name != "list":
            action.add_argument("name", metavar="NAME")
        if name == "add":
            action.add_argument("--routes", metavar="ROUTE,...", help="allowed routes (default: all)")
            for option in ("requests-per-minute", "tokens-per-minute", "concurrent-requests"):
                action.add_argument(f"--{option}", type=COUNT, metavar="N", help="limit (default: none)")
            action.add_argument("--monthly-cost-usd", type=positive, metavar="USD", help="limit (default: none)")
            action.add_argument("--weight", type=positive, default=1.0, help="share of engine time among keys")
            action.add_argument(
                "--cache-group", metavar="NAME", help="keys of one group share prefix caches (default: its own)"
            )
        action.add_argument("--config", dest="files", help="of the gateway, with state.keys (default: none)", **FILES)


def _add_facts(facts: argparse.ArgumentParser) -> None:
    actions = facts.add_subparsers(metavar="ACTION", dest="action", required=True, parser_class=CommandParser)
    show = actions.add_parser("show", help="print each fact of a model, with its source")
    show.add_argument("model", metavar="MODEL")
    show.add_argument("--pool", metavar="NAME", help="as this pool of the configuration believes (default: none)")
    show.add_argument("--config", dest="files", help="with its pools and newer facts (default: none)", **FILES)
    learned = "with what a running gateway has learned, by its admin port (default: none)"
    show.add_argument("--admin", type=address, metavar="URL", help=learned)
    update = actions.add_parser("update", help="check a newer file of facts, and keep it in state.dir")
    update.add_argument("--from", dest="source", metavar="FILE|URL", required=True, help="models.yaml or apis.yaml")
    update.add_argument("--digest", metavar="sha256:...", help="of its contents; a URL needs it (default: none)")
    update.add_argument("--config", dest="files", help="of the gateway, with state.dir (default: none)", **FILES)


def _add_import(importing: argparse.ArgumentParser) -> None:
    formats = importing.add_subparsers(metavar="FORMAT", dest="format", required=True, parser_class=CommandParser)
    texts = {"litellm": "LiteLLM's proxy, config.yaml", "production-stack": "vLLM's production-stack, Helm values"}
    for name, text in texts.items():
        added = formats.add_parser(name, help=text, description=text)
        added.add_argument("file", metavar="FILE", type=Path)
        added.add_argument("-o", dest="output", metavar="FILE", type=Path, help="a new file (default: stdout)")
    added.add_argument("--release", metavar="NAME", default="vllm", help="name of the Helm release")


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("kind", metavar="KIND", choices=EXPORTS, help=f"one of {', '.join(EXPORTS)}")
    export.add_argument("folder", metavar="DIR", type=Path, help="made if it does not exist")
    export.add_argument("--force", action="store_true", help="write over files of another content")


def _version(args: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"firsttoken {version('firsttoken')}")
    except PackageNotFoundError:
        print("firsttoken, not installed: run from its sources")
    return 0


def serve(args: argparse.Namespace) -> int:
    if args.picker and not args.files:
        raise ConfigError(["firsttoken: name a file: firsttoken pick FILE"])
    if not args.files:
        from gateway.cli.up.up import serve_found

        return serve_found(args)
    from gateway import serve as server
    from gateway.config.loading import load
    from gateway.config.notes import notes
    from gateway.part_list import CONFIG
    from gateway.reload import ConfigSource
    from gateway.tokenize.tokenizers import EncoderError

    def read() -> Config:
        config = load(args.files, os.environ, CONFIG)
        config = (config.with_picker() if args.picker else config).with_ports(args.port, args.admin_port)
        return config if args.workers is None else config.with_workers(args.workers)

    source = ConfigSource(read, args.files)
    config = read()
    for note in notes(config):
        print(f"firsttoken: {note}", file=sys.stderr)
    try:
        return server.serve(config, source)
    except EncoderError as error:
        raise ConfigError([str(error)]) from None
