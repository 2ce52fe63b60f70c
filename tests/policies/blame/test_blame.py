"""The table of blame, and its copy for operators in docs/failures.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.blame.blame import BLAME, Blame, Elsewhere, Evidence, Fault, blame_of, reason
from policies.types import AttemptOutcome

PAGE = Path(__file__).parents[3] / "docs" / "failures.md"


def documented(row: Blame) -> str:
    """A line of the page."""
    others = "nothing"
    if row.evidence.needs_witness:
        others = "the same, with a second witness"
    elif row.evidence is Evidence.UNREACHABLE:
        others = "the same, at once"
    sure = "it says so" if row.sure else "inferred"
    return f"| `{row.kind}` | {row.fault.value} | {sure} | {row.elsewhere.value} | {row.evidence.value} | {others} |"


def test_the_page_of_failures_has_the_table_as_it_is() -> None:
    """Every row, in the same order, and no other."""
    text = PAGE.read_text("utf-8")
    begin = text.index("| kind | whose fault |")
    rows = text[begin : text.index("\n\n", begin)].splitlines()[2:]
    assert rows == [documented(row) for row in BLAME.values()]


def test_a_fault_of_the_request_is_no_evidence_against_an_endpoint() -> None:
    """Nor is one of the gateway, of the DNS, or of a caller's own key; every other fault is some."""
    own = (Fault.REQUEST, Fault.OWN_CONTENT, Fault.REQUEST_SIZE, Fault.OPERATION, Fault.FORM, Fault.CALLER_CREDENTIAL)
    none = (*own, Fault.GATEWAY, Fault.RESOLVER)
    assert all((row.fault in none) == (row.evidence in (Evidence.NONE, Evidence.ANSWERED)) for row in BLAME.values())


def test_only_what_does_not_depend_on_the_request_needs_no_witness() -> None:
    """A refused connection: nobody has read the request."""
    harmful = [row for row in BLAME.values() if row.evidence not in (Evidence.NONE, Evidence.ANSWERED)]
    assert [row.kind for row in harmful if not row.evidence.needs_witness] == ["connect"]


def test_a_limit_of_the_account_is_no_failure() -> None:
    """The provider says until when to wait."""
    busy = [row.kind for row in BLAME.values() if row.evidence is Evidence.BUSY]
    assert busy == ["overloaded", "queue_limit", "rate_limited", "request_rate", "token_rate"]
    assert not any(BLAME[kind].evidence.is_failure for kind in busy)


def test_a_request_that_goes_nowhere_is_never_charged() -> None:
    """The retry budget is for attempts that add load."""
    assert not any(row.charged for row in BLAME.values() if row.elsewhere is Elsewhere.NOWHERE)


@pytest.mark.parametrize("outcome", [one for one in AttemptOutcome if one is not AttemptOutcome.COMPLETED])
def test_every_outcome_but_an_answer_has_some_blame(outcome: AttemptOutcome) -> None:
    """Where no more is known than the outcome."""
    assert blame_of(outcome) is not None
    assert blame_of(AttemptOutcome.COMPLETED) is None


def test_a_connection_lost_before_a_byte_may_be_the_requests_doing() -> None:
    """Without another word it counts as reset, not as refused."""
    found = blame_of(AttemptOutcome.FAILED, connected=False)
    assert found is BLAME["reset"]


def test_a_reason_names_the_fault_and_nothing_of_the_message() -> None:
    """The message may hold content of the caller."""
    cause = "401 invalid_api_key: Incorrect API key provided: sk-secret"
    assert reason(BLAME["auth"], cause) == "the provider refuses the gateway's key (401 invalid_api_key)"
    assert reason(BLAME["auth"], "") == "the provider refuses the gateway's key"
    assert reason(BLAME["connect"], "connection refused") == "connection refused"
