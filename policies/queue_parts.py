"""The list of the parts of the queue, in the order in which the queue asks them."""

from __future__ import annotations

from policies.batch.batch_work import Batch
from policies.queue.queue_part import QueuePart
from policies.tenant_use import FairShare


def queue_parts() -> tuple[QueuePart, ...]:
    """New ones: each scheduler has its own."""
    return Batch(), FairShare()
