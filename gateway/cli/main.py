"""The commands. Exit codes: 0 success, 2 invalid input or configuration, 1 internal error.

A command imports its modules when it runs, so `--help` and `check` start at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gateway.config.config_errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from gateway.config.models import Config

MAX_WORKERS = 256
COMMANDS = ("up", "serve", "check", "schema", "import", "explain", "keys", "replay", "top", "demo", "simulate")
FROM_ENVIRONMENT = "merged in this order (default: API keys in the environment)"
FROM_MACHINE = "merged in this order (default: the servers that `up` finds)"
WORKERS_HELP = "processes that share the port (default: server.workers)"
FILES: dict[str, Any] = {"metavar": "FILE", "type": Path, "nargs": "+", "action": "extend", "default": []}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Errors are one line: `--help` prints the usage."""
        print(f"firsttoken: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Shows the default in the help, unless the text names one."""
        default, text = options.get("default"), options.get("help", "")
        if default not in (None, [], argparse.SUPPRESS) and "default" not in text:
            options["help"] = (
                f"{text} (default: {default:g})" if isinstance(default, float) else f"{text} (default: {default})"
            )
            options["help"] = options["help"].strip()
        return super().add_argument(*names, **options)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(arguments)
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


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser("firsttoken", description="A latency-aware LLM routing gateway.")
    parser.set_defaults(run=None)
    parser.add_argument("--version", dest="run", action="store_const", const=_version, help="print the version")
    _add_commands(parser)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        parser.error(f"no command '{arguments[0]}'{did_you_mean(arguments[0], COMMANDS)}")
    args = parser.parse_args(arguments)
    if args.run is None:
        parser.error(f"name a command: {', '.join(COMMANDS)}")
    return args


def _add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)

    def command(name: str, text: str, module: str = "", function: str = "") -> argparse.ArgumentParser:
        """The command is a function of `module`, by default the attribute `name` of gateway.cli.NAME."""
        added = commands.add_parser(name, help=text, description=text)
        called = function or name
        added.set_defaults(run=lambda args: getattr(import_module(module or f"gateway.cli.{name}"), called)(args))
        return added

    _add_up(command("up", "find model servers and API keys on this machine, and serve them", "gateway.cli.up.up"))
    serve = command("serve", "run the gateway; without a file, of the servers that `up` finds", __name__)
    serve.add_argument("--config", dest="files", help=FROM_MACHINE, **FILES)
    _add_ports(serve)
    serve.add_argument("--workers", type=WORKERS, metavar="N", help=WORKERS_HELP)
    check = command("check", "validate a configuration without starting anything", "gateway.cli.config_commands")
    check.add_argument("files", metavar="FILE", type=Path, nargs="*", help=FROM_ENVIRONMENT)
    check.add_argument("--live", action="store_true", help="ask every endpoint for its models and one token too")
    check.add_argument("--no-tokens", action="store_true", help="with --live: ask for nothing that costs anything")
    check.add_argument("--timeout", type=_positive, metavar="S", help="with --live: of one request (default: 10)")
    explain = command("explain", "where a request would go, and why; nothing is sent")
    explain.add_argument("request", metavar="REQUEST.json", type=Path, nargs="?", help="the body of a request")
    explain.add_argument("--config", dest="files", help=FROM_ENVIRONMENT, **FILES)
    explain.add_argument("--route", metavar="NAME", help="route (default: the model in the request)")
    explain.add_argument(
        "--admin", metavar="URL", help="ask a running gateway, by its admin port (default: none, decide here)"
    )
    explain.add_argument(
        "--key-env", metavar="NAME", help="with --admin: the variable with the API key to ask as (default: none)"
    )
    explain.add_argument("--json", action="store_true", help="print the reply of POST /explain")
    _add_keys(command("keys", "callers' keys that are kept in Redis: add, revoke, list", "gateway.cli.config_commands"))
    replay = command(
        "replay", "try a configuration on recorded traffic, in virtual time", "gateway.replay.replay_command"
    )
    _add_replay(replay)
    top = command("top", "live view of a running gateway: routes, endpoints, slowest requests")
    top.add_argument("--admin", metavar="URL", default="http://127.0.0.1:9090", help="its admin port")
    top.add_argument("--interval", type=_positive, default=2.0, metavar="S", help="seconds between two polls")
    top.add_argument("--once", action="store_true", help="print one frame, over one interval")
    importing = "gateway.cli.importing.import_command"
    _add_import(command("import", "write a configuration of ours from another gateway's", importing, "run_import"))
    command("schema", "print the JSON Schema of the configuration", "gateway.cli.config_commands")
    demo_text = "simulated engines, gateway, traffic and a live table: no GPU, no key"
    demo = command("demo", demo_text, "gateway.cli.demo.demo")
    demo.add_argument("--port", type=PORT, default=8080, help="of the gateway")
    demo.add_argument("--admin-port", type=PORT, default=9090, help="of its admin server")
    demo.add_argument("--seconds", type=_positive, help="end after this time (default: at a signal)")
    simulate = command("simulate", "run a simulated engine with the API of vLLM")
    simulate.add_argument("--profile", required=True, help="what it simulates, such as 8b-h100 (required)")
    simulate.add_argument("--port", type=PORT, required=True, help="0 takes any free one (required)")
    simulate.add_argument("--host", default="127.0.0.1", help="address to listen on")
    simulate.add_argument("--model", help="the name of the model it serves (default: that of the profile)")
    simulate.add_argument("--speed", type=_positive, default=1.0, help="2 is twice as fast as the real engine")


def _add_ports(command: argparse.ArgumentParser) -> None:
    command.add_argument("--port", type=PORT, metavar="N", help="data port (default: as in the file, or 8080)")
    command.add_argument("--admin-port", type=PORT, metavar="N", help="admin port (default: as in the file, or 9090)")
    local = "without a file: ports of this machine to ask, as 8000,11434, or none (default: those of model servers)"
    command.add_argument("--local", type=_ports, metavar="PORTS", help=local)


def _add_up(up: argparse.ArgumentParser) -> None:
    _add_ports(up)
    up.add_argument("--write", action="store_true", help="write firsttoken.yaml; never over an existing file")
    tokens = up.add_mutually_exclusive_group()
    yes, no = "time first tokens of APIs too, unasked: they cost", "send no prompt to any server"
    tokens.add_argument("--tokens", action="store_true", default=None, help=yes)
    tokens.add_argument("--no-tokens", dest="tokens", action="store_false", default=None, help=no)


def _ports(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(map(PORT, text.split(",")))


def _add_keys(keys: argparse.ArgumentParser) -> None:
    actions = keys.add_subparsers(metavar="ACTION", dest="action", required=True, parser_class=_Parser)
    texts = {"add": "make a key and print it, once", "revoke": "revoke a key", "list": "list all keys"}
    for name, text in texts.items():
        action = actions.add_parser(name, help=text, description=text)
        if name != "list":
            action.add_argument("name", metavar="NAME")
        if name == "add":
            action.add_argument("--routes", metavar="ROUTE,...", help="allowed routes (default: all)")
            for option in ("requests-per-minute", "tokens-per-minute", "concurrent-requests"):
                action.add_argument(f"--{option}", type=COUNT, metavar="N", help="limit (default: none)")
            action.add_argument("--monthly-cost-usd", type=_positive, metavar="USD", help="limit (default: none)")
            action.add_argument("--weight", type=_positive, default=1.0, help="share of engine time among keys")
            action.add_argument(
                "--cache-group", metavar="NAME", help="keys of one group share prefix caches (default: its own)"
            )
        action.add_argument("--config", dest="files", help="of the gateway, with state.redis (default: none)", **FILES)


def _add_import(importing: argparse.ArgumentParser) -> None:
    formats = importing.add_subparsers(metavar="FORMAT", dest="format", required=True, parser_class=_Parser)
    texts = {"litellm": "LiteLLM's proxy, config.yaml", "production-stack": "vLLM's production-stack, Helm values"}
    for name, text in texts.items():
        added = formats.add_parser(name, help=text, description=text)
        added.add_argument("file", metavar="FILE", type=Path)
        added.add_argument("-o", dest="output", metavar="FILE", type=Path, help="a new file (default: stdout)")
    added.add_argument("--release", metavar="NAME", default="vllm", help="name of the Helm release")


def _add_replay(replay: argparse.ArgumentParser) -> None:
    add = replay.add_argument
    formats = "Mooncake JSON lines, an Azure CSV, our own access log, recorded sessions, or synthetic:agents"
    add("traces", metavar="[ROUTE=]TRACE", nargs="+", help=formats)
    add("--config", dest="files", help="the policy to try (required)", required=True, **FILES)
    add("--config-b", dest="files_b", help="another one (default: none)", **FILES)
    add("--load", default="1", help="multiple of the rate of the trace: 1, 0.6,1,1.4 or 0.6..1.4")
    add("--seed", type=COUNT, default=0, help="seed of the first replay")
    add("--seeds", type=COUNT, default=1, metavar="K", help="number of seeds, from --seed on")
    add("--limit", type=COUNT, metavar="N", help="only the first requests of each trace (default: all)")
    add("--seconds", type=_positive, metavar="S", help="only the first seconds of the replay (default: all)")
    add("--closed", action="store_true", help="a turn of a session comes its think time after the answer before")
    add("--sessions", type=_positive, default=0.1, metavar="RATE", help="new sessions/s of recorded sessions")
    scoring = (
        "score by TTFT budgets with this much per 1,000 new prompt tokens, 0ms: fixed (default: as the routes say)"
    )
    add("--score-per-1k", metavar="TIME", help=scoring)
    add("--scorers", default="all", help="baselines, separated by commas; all, or none")
    add("--no-reference", action="store_true", help="without the clairvoyant reference")
    add("--workers", type=WORKERS, metavar="N", help=WORKERS_HELP)
    add("--replicas", type=WORKERS, metavar="N", help="gateways that share state over Redis (default: 1)")
    add("--news", default="2ms", metavar="TIME", help="delay of updates between replicas, or off")
    add("--worst", type=COUNT, default=0, metavar="N", help="show the decisions with the most regret")
    faults = "slow:FACTOR, kill or restart, such as main/h1:8000@90s=slow:5 (default: none)"
    add("--fault", nargs="+", action="extend", default=[], metavar="ENDPOINT@TIME=WHAT", help=faults)
    add("--json", action="store_true", help="print every replay as JSON")


def _integer(low: int, high: float, expected: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"'{text}' is not {expected}")
        return int(text)

    return parse


COUNT = _integer(0, float("inf"), "a whole number")
WORKERS = _integer(1, MAX_WORKERS, f"a number of workers, 1 to {MAX_WORKERS}")
PORT = _integer(0, 65535, "a port, 0 to 65535")


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number


def _version(args: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"firsttoken {version('firsttoken')}")
    except PackageNotFoundError:
        print("firsttoken, not installed: run from its sources")
    return 0


def serve(args: argparse.Namespace) -> int:
    if not args.files:
        from gateway.cli.up.up import serve_found

        return serve_found(args)
    from gateway import serve as server
    from gateway.config.loading import load
    from gateway.config.notes import notes
    from gateway.reload import ConfigSource
    from gateway.tokenize.tokenizers import EncoderError

    def read() -> Config:
        config = load(args.files, os.environ).with_ports(args.port, args.admin_port)
        return config if args.workers is None else config.with_workers(args.workers)

    source = ConfigSource(read, args.files)
    config = read()
    for note in notes(config):
        print(f"firsttoken: {note}", file=sys.stderr)
    try:
        return server.serve(config, source)
    except EncoderError as error:
        raise ConfigError([str(error)]) from None
