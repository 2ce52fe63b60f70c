"""The list of the parts of the queue, in the order in which the queue asks them."""

from __future__ import annotations

from policies.batch.batch_work import Batch
from policies.fair_share.fair_share import FairShare
from policies.queue.queue_part import QueuePart


def queue_parts() -> tuple[QueuePart, ...]:
    """New ones: each scheduler has its own."""
    return Batch(), FairShare()
