"""Part: a feature attached to the core; docs/adding-a-part.md shows a complete part.

Rules:
- The core imports no part and names none; parts never import each other.
- A part is built once by its class, from the core and its configuration. A class whose section of the configuration is
  absent builds a part that does nothing, and imports nothing that only the section needs.
- A part reads the core's values, and writes only its own values and the core's callbacks for parts.
- Parts start in the order of the list, and close in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from prometheus_client.registry import Collector

from gateway.config.models import Config
from gateway.core.hooks import Hooked
from gateway.observe.columns import Column
from gateway.observe.record import Record
from gateway.observe.recorder import Annotator
from gateway.runtime import Runtime
from policies.routes.route import Strict

RecordReader = Callable[[Record], None]


class Part(Hooked):
    """Base of the gateway's parts; every member has a default.

    `collectors`: metrics of the part for /metrics. `annotators`: called in batches, after the last byte of an
    answer, with the Record of an ended request, the request and the estimate of its prompt: add notes, and never raise.
    `readers`: called then with the complete Records. Neither ever waits.
    """

    # Keys of the configuration that the part adds, each with a default: of every route, of every pool, and of a section
    # by the name `section`. `keys_of` and `section_of` of gateway/config/part_keys.py read them.
    RouteKeys: ClassVar[type[Strict] | None] = None
    PoolKeys: ClassVar[type[Strict] | None] = None
    Section: ClassVar[type[Strict] | None] = None
    section: ClassVar[str] = ""

    columns: ClassVar[Sequence[Column[Record]]] = ()  # of the Record, most often of a `Note` that the part puts there
    collectors: Sequence[Collector] = ()
    annotators: Sequence[Annotator] = ()
    readers: Sequence[RecordReader] = ()

    def __init__(self, core: object) -> None:
        """`core`: a `gateway.wiring.Core`."""

    async def start(self) -> None:
        """Start work. The admin port is open, the data port not yet."""

    async def open(self) -> None:
        """Open its own port to callers: everything is loaded, and the data port is open. Raises OSError."""

    async def follow(self, config: Config) -> None:
        """Discover the endpoints of a configuration before the configuration is applied."""

    def completed(self, config: Config) -> Config:
        """The configuration completed with discoveries of `follow`. Called in a thread."""
        return config

    def extended(self, runtime: Runtime) -> Runtime:
        """A Runtime with the part's additions. Called in a thread, before the Runtime is applied."""
        return runtime

    def reload(self) -> None:
        """Follow the Runtime that has just come into force, within the same turn of the loop."""

    def pool_members(self, pool: str) -> Mapping[str, Any]:
        """Members that the part adds to the rows of a pool's endpoints in GET /fleet."""
        return {}

    def reopen(self) -> None:
        """Reopen files by name after `logrotate`."""

    def succeeded(self) -> None:
        """Another process serves from now on with the same files: write none of those that only one may write."""

    def drain(self) -> None:
        """Take no new callers."""

    async def close(self) -> None:
        """Stop all work. No request is in progress."""
