"""Writes the attempts of a request into its Record."""

from __future__ import annotations

from dataclasses import replace

from backends.body_changes import told
from gateway.observe.part_notes import LEFT_OUT
from gateway.observe.record import AttemptRecord
from gateway.upstream.answer_hooks import Rest
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.routed_request import RoutedRequest, header_safe
from policies.types import AttemptOutcome


def note_won(routed: RoutedRequest, wire: WireAttempt, first_in: float) -> None:
    """The attempt answers the caller. `first_in`: monotonic s of the answer's first token."""
    times, model, pool = wire.times, wire.request.model, wire.attempt.candidate.endpoint.pool
    if (translated := routed.request.translated.get(pool)) is not None:
        LEFT_OUT.put(routed.timeline.record, translated.left_out)
    if wire.request.changes and (changed := told(wire.request.changes, wire.request.body)):
        LEFT_OUT.put(routed.timeline.record, {**LEFT_OUT.of(routed.timeline.record), **changed})
    if lost := routed.request.withheld + wire.upstream.backend.lost(wire.request):
        found = LEFT_OUT.of(routed.timeline.record)
        LEFT_OUT.put(routed.timeline.record, {**found, **{member: member for member in lost}})
    routed.timeline.won(
        wire.attempt.candidate,
        header_safe(model) if routed.model else model,
        opened=times.opened,
        connected=times.connected,
        sent=times.sent or times.opened,
        first_in=first_in,
        head=times.head,
        first_byte=times.first_byte,
    )


def record_lost(routed: RoutedRequest, wire: WireAttempt) -> None:
    routed.timeline.attempt_ended(_record(routed, wire))


def record_winner(routed: RoutedRequest, wire: WireAttempt, first_in: float, rest: Rest | None) -> None:
    """Record the attempt whose answer the caller got. With `rest`, counts include the broken answer before."""
    assert wire.report is not None
    reported, output = wire.report, wire.report.output_tokens
    if wire.tap.usage.compacted:  # compaction: not in `report`, which teaches the fleet
        usage = wire.tap.usage
        reported = replace(reported, prompt_tokens=usage.prompt, cached_tokens=usage.cached)
    tpot = wire.times.tpot(output) if wire.stream else None
    if wire.stream and wire.times.first_in is not None and wire.outcome is not AttemptOutcome.COMPLETED:
        wire.times.note_silence(wire.times.quiet_since, wire.times.ended)
    if rest is not None:
        reported = replace(reported, prompt_tokens=rest.prompt_tokens())
        output += rest.tokens_before()
        tpot = (wire.times.last_token - first_in) / max(output - 1, 1)
    routed.timeline.answered(
        _record(routed, wire),
        reported,
        wire.tap.times,
        output_tokens=output,
        tpot=tpot,
        gaps=wire.times.gaps(output),
        blocks=routed.estimate.pools[wire.attempt.candidate.endpoint.pool].blocks,
        reasoning_in=wire.times.reasoning_in,
        answer_in=wire.times.answer_in if rest is None else wire.times.first_in,
        usage=wire.tap.usage if rest is None else None,
        facts=wire.tap.facts,
    )


def _record(routed: RoutedRequest, wire: WireAttempt) -> AttemptRecord:
    attempt, consumed, failure = wire.attempt, wire.consumption, wire.failure
    arrival = routed.timeline.record.arrival
    return AttemptRecord(
        attempt.number,
        attempt.kind,
        attempt.candidate.endpoint.id,
        attempt.candidate.endpoint.pool,
        opened=wire.times.opened - arrival,
        ended=wire.times.ended - arrival,
        ending=wire.outcome or AttemptOutcome.CANCELLED,
        upstream_id=wire.request.request_id,
        tokens=consumed.tokens,
        cost_usd=consumed.cost_usd,
        junk=wire.tap.junk,
        status=wire.status,
        cause=wire.unassembled or ("" if failure is None else failure.said),
        charged=not wire.unassembled,
        engine_kv_tokens=wire.fleet.view.engine_kv_tokens(attempt.candidate.endpoint.id),
        locality=attempt.candidate.endpoint.locality,
    )
