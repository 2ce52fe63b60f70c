"""The table of `policies.blame` and the kinds of failures of `backends` name the same things."""

from __future__ import annotations

from backends.interface import FailureKind
from policies.blame.blame import BLAME


def test_every_kind_of_failure_has_a_row_in_the_table_of_blame() -> None:
    """The packages do not know each other: the gateway looks a failure up by its value."""
    assert {kind.value for kind in FailureKind} == set(BLAME)
