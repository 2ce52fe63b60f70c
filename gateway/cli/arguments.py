"""Parser and argument types of the commands: a wrong argument is an error of one line."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

MAX_WORKERS = 256  # as gateway.config.models, whose import takes too long for a command line
MAX_WINDOW = 60  # minutes that the gateway can compare, as gateway.observe.slow_requests
WORKERS_HELP = "processes that share the port (default: server.workers)"
ORDERS = ("configured", "worst", "traffic", "name")  # of `top`, as gateway.cli.top_tables.Sort
WINDOWS = ("now", "5m", "1h")  # of `top`, as gateway.cli.top_tables.WINDOWS
EXPORTS = {  # files by kind, as patterns of paths
    "dashboards": "deploy/helm/firsttoken/files/dashboards/*.json",
    "rules": "deploy/helm/firsttoken/files/rules/*.yml",
    "presets": "policies/presets/*.yaml",
    "envoy": "deploy/envoy/*.yaml",
    "haproxy": "deploy/haproxy/*.cfg",
    "kubernetes": "deploy/kubernetes/*.yaml",
    "nginx": "deploy/nginx/*.conf",
    "systemd": "deploy/systemd/*.service",
}
FILES: dict[str, Any] = {"metavar": "FILE", "type": Path, "nargs": "+", "action": "extend", "default": []}
FILE_LIST: dict[str, Any] = {**FILES, "nargs": "*"}  # the same without `--config`
ADMIN = "http://127.0.0.1:9090"  # of a gateway of this machine

# Arguments: name, help, and "MODULE:FUNCTION" to run, which is imported when the command runs.
AddCommand = Callable[[str, str, str], argparse.ArgumentParser]


class CommandParser(argparse.ArgumentParser):
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


def _integer(low: int, high: float, expected: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"'{text}' is not {expected}")
        return int(text)

    return parse


COUNT = _integer(0, float("inf"), "a whole number")
WORKERS = _integer(1, MAX_WORKERS, f"a number of workers, 1 to {MAX_WORKERS}")
PORT = _integer(0, 65535, "a port, 0 to 65535")


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number


def with_scheme(text: str) -> str:
    return text if "://" in text else f"http://{text}"


def address(text: str, port: int = 9090) -> str:
    """URL of a gateway. Without a scheme it is HTTP, at `port` if it has none; a port alone is one of this machine."""
    url = with_scheme(text)
    if alone := re.fullmatch(r":?(\d{1,5})", text):
        url = f"http://127.0.0.1:{alone[1]}"
    elif url != text and not re.search(r":\d+(/|$)", text):
        url = f"{url}:{port}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query
    except ValueError:
        usable = None
    if not usable or parts.fragment:
        shown = "this" if "@" in text else f"'{text}'"  # it may have a password
        raise argparse.ArgumentTypeError(f"{shown} is not an address of HTTP, such as {ADMIN}")
    return url.rstrip("/")


def data_address(text: str) -> str:
    return address(text, 8080)


def log_or_address(text: str) -> str:
    """Path of a log, or the address of a gateway."""
    is_address = re.match(r"https?://|[\w.-]*:\d+$", text) and not Path(text).exists()
    return address(text) if is_address else text


def period(text: str) -> float:
    """A time such as 15m, 6h or 7d, in seconds."""
    number, unit = text[:-1], text[-1:]
    units = {"m": 60, "h": 3600, "d": 86400}
    seconds = int(number) * units.get(unit, 0) if number.isdecimal() and len(number) < 6 else 0
    if not seconds:
        raise argparse.ArgumentTypeError(f"'{text}' is not a time such as 15m, 6h or 7d")
    return seconds


def window(text: str) -> int:
    """A time such as 15m or 1h, in minutes."""
    number, unit = text[:-1], text[-1:]
    minutes = int(number) * {"m": 1, "h": 60}.get(unit, 0) if number.isdecimal() and len(number) < 5 else 0
    if not 1 <= minutes <= MAX_WINDOW:
        raise argparse.ArgumentTypeError(f"'{text}' is not a time from 1m to {MAX_WINDOW}m")
    return minutes
