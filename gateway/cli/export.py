"""`firsttoken export`: writes files for programs beside a gateway into a folder: dashboards, rules, a systemd unit.

A wheel holds them in `gateway/deploy`, a checkout in `deploy`, with the same names below.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gateway.cli.arguments import EXPORTS
from gateway.config.config_errors import ConfigError

PACKAGE = Path(__file__).parents[1]
ROOTS = (PACKAGE, PACKAGE.parent)  # of a wheel, of a checkout


def export(args: argparse.Namespace) -> int:
    """`args`: kind, folder, force. Raises ConfigError; a file of another content is then left as it was."""
    folder: Path = args.folder
    try:
        files = {folder / source.name: source.read_bytes() for source in sources(args.kind)}
        changed = [path for path, content in files.items() if path.exists() and path.read_bytes() != content]
        if changed and not args.force:
            raise ConfigError([f"{path}: exists with another content; --force writes over it" for path in changed])
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            path.write_bytes(content)
    except OSError as error:
        raise ConfigError([f"{error.filename}: {error.strerror}"]) from None
    print("\n".join(map(str, files)))
    return 0


def sources(kind: str) -> list[Path]:
    """Files of a kind, in order. Raises FileNotFoundError for an installation without them."""
    for root in ROOTS:
        if found := sorted(root.glob(EXPORTS[kind])):
            return found
    raise FileNotFoundError(2, "missing in this installation", EXPORTS[kind])
