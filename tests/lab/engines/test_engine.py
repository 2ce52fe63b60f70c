from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.engines.engine import Engine
from lab.engines.engine_events import EngineFirstToken, Finished, Refused, StepResult
from lab.engines.lora_adapters import LoraAdapters
from lab.engines.virtual_engine import VirtualEngine
from tests.support.engine_builders import ask, engine, quiet, seconds, virtual


def run(one: Engine, at: float = 0.0) -> list[StepResult]:
    """Step until nothing is left."""
    steps = []
    while (step := one.step(at)) is not None:
        steps.append(step)
        at = step.ends_at
    return steps


def firsts(steps: list[StepResult]) -> list[Any]:
    return [first.id for step in steps for first in step.first]


# ------------------------------------------------------------------- time


def test_a_lone_request_takes_one_prefill_and_its_decode_steps():
    """Three tokens: a prefill, then two decode steps with a context one longer each."""
    one = engine()
    one.submit(ask(1, 1000, 3), now=5.0)
    first = seconds(one.profile, 1000, 1, pairs=1000 * 500)
    second, third = (seconds(one.profile, 1, 1, context=1000 + i) for i in range(2))
    assert [step.ends_at for step in run(one, 5.0)] == pytest.approx(
        [5 + first, 5 + first + second, 5 + first + second + third]
    )


def test_the_api_server_delays_a_request_before_the_scheduler_sees_it():
    """The overhead is part of the TTFT, and not of the queue time."""
    one = VirtualEngine(engine(overhead=0.015))
    one.submit(ask(1, 1000), now=1.0)
    took = seconds(one.engine.profile, 1000, 1, pairs=1000 * 500)
    [first, _] = one.run_until(9.0)
    assert (first.at, first.queue_time) == (pytest.approx(1.015 + took), 0.0)


def test_a_slowed_engine_takes_longer_by_that_factor():
    """Drift: the same work, three times the time."""
    one = engine()
    one.slowness = 3.0
    one.submit(ask(1, 1000), now=0.0)
    assert run(one)[0].ends_at == pytest.approx(3 * seconds(one.profile, 1000, 1, pairs=1000 * 500))


def test_the_same_seed_gives_the_same_times_and_another_seed_others():
    """Noise is drawn from the seed alone."""

    def ends(seed: int) -> list[float]:
        one = Engine(quiet(sigma=0.05), seed)
        one.submit(ask(1, 500, 20), now=0.0)
        return [step.ends_at for step in run(one)]

    assert (ends(1) == ends(1), ends(1) == ends(2)) == (True, False)


# ------------------------------------------------------------------- scheduling


def test_requests_are_served_first_come_first_served():
    """A short prompt does not overtake a long one."""
    one = engine(max_num_batched_tokens=1000)
    for id, prompt in enumerate((3000, 10, 2000, 10)):
        one.submit(ask(id, prompt), now=0.0)
    assert firsts(run(one)) == [0, 1, 2, 3]


def test_a_long_prompt_is_prefilled_in_chunks():
    """No step computes more than max_num_batched_tokens."""
    one = engine(max_num_batched_tokens=8192)
    one.submit(ask(1, 20_000), now=0.0)
    assert [step.prefill_tokens for step in run(one)] == [8192, 8192, 3616]


def test_decoding_goes_on_while_a_prompt_is_prefilled():
    """Each step first gives a token to every decoding request; the prefill chunk is smaller by as many."""
    one = engine(max_num_batched_tokens=1000)
    one.submit(ask("talker", 100, 50), now=0.0)
    first = one.step(0.0)
    assert first is not None
    one.submit(ask("newcomer", 2500, 1), now=first.ends_at)
    steps = run(one, first.ends_at)[:3]
    assert [(s.tokens, s.prefill_tokens) for s in steps] == [
        (("talker",), 999),
        (("talker",), 999),
        (("talker", "newcomer"), 502),
    ]


def test_no_more_than_max_num_seqs_run_at_once():
    """The next request waits until a running one ends."""
    one = engine(max_num_seqs=2)
    for id in range(3):
        one.submit(ask(id, 10, 3), now=0.0)
    step = one.step(0.0)
    assert step is not None
    assert (one.running, one.waiting, firsts(run(one, step.ends_at))) == (2, 1, [2])


def test_a_full_queue_refuses_with_503():
    """max_queued_requests counts unfinished requests, as vLLM's --max-num-queued-reqs does."""
    one = engine(max_queued_requests=2)
    one.submit(ask(1, 10), now=0.0)
    one.submit(ask(2, 10), now=0.0)
    with pytest.raises(Refused, match="2 requests are unfinished already") as refused:
        one.submit(ask(3, 10), now=0.0)
    assert refused.value.status == 503


def test_queue_time_is_the_time_spent_waiting_for_the_scheduler():
    """A request submitted during a step waits for the end of the step."""
    one = engine()
    one.submit(ask(1, 8192), now=0.0)
    step = one.step(0.0)
    assert step is not None
    one.submit(ask(2, 10), now=0.1)
    [second] = [first for later in run(one, step.ends_at) for first in later.first]
    assert second.queue_time == pytest.approx(step.ends_at - 0.1)


# ------------------------------------------------------------------- prefix cache


def test_a_cached_prefix_is_not_computed_again():
    """The second request with the same 1,600 tokens computes only 400 new ones."""
    one = engine()
    one.submit(ask(1, 1600, name="same"), now=0.0)
    run(one)
    one.submit(ask(2, 2000, name="same"), now=1.0)
    [step] = run(one, 1.0)
    assert (step.prefill_tokens, step.first[0].cached_tokens) == (400, 1600)


def test_a_prompt_is_never_hit_as_a_whole():
    """The last token is always computed, so a fully cached prompt still computes one block."""
    one = engine()
    for now in (0.0, 1.0):
        one.submit(ask(now, 1600, name="same"), now=now)
        [step] = run(one, now)
    assert (step.prefill_tokens, one.prefix_hits, one.prefix_queries) == (16, 1584, 3200)


def test_the_next_turn_of_a_conversation_hits_the_answer_too():
    """The prompt's last partial block and the answer are full blocks in the end."""
    one = engine()
    one.submit(ask("turn 1", 1000, 201, name="talk"), now=0.0)
    run(one)
    one.submit(ask("turn 2", 1500, name="talk"), now=9.0)
    assert run(one, 9.0)[0].first[0].cached_tokens == 1200


def test_prompts_of_one_step_share_a_common_prefix():
    """A burst with a common prefix prefills it once."""
    one = engine()
    for id in range(4):
        one.submit(ask(id, 1601, name="burst"), now=0.0)
    assert run(one)[0].prefill_tokens == 1601 + 3 * 1


def test_a_restarted_engine_forgets_its_prefixes():
    """A kill loses the running requests and the cache."""
    one = engine()
    one.submit(ask(1, 1600, name="same"), now=0.0)
    run(one)
    one.submit(ask(2, 1600, name="same"), now=1.0)
    lost = one.kill()
    with pytest.raises(Refused, match="dead"):
        one.submit(ask(3, 10), now=1.0)
    one.restart()
    one.submit(ask(4, 1600, name="same"), now=2.0)
    assert (lost, run(one, 2.0)[0].prefill_tokens, one.kv_usage) == ((2,), 1600, 0.0)


# ------------------------------------------------------------------- blocks


def test_a_request_waits_until_its_whole_prompt_fits():
    """A cache of 100 blocks takes the second prompt of 60 only when the first has ended."""
    one = engine(kv_tokens=1600)
    one.submit(ask(1, 960, 5), now=0.0)
    one.submit(ask(2, 960, 5), now=0.0)
    steps = run(one)
    assert (firsts(steps[:1]), steps[4].finished[0].id, firsts(steps[5:])) == ([1], 1, [2])


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3], ids=["arriving", "prefilling", "decoding", "later"])
def test_an_abort_frees_all_blocks_at_once(steps_before: int):
    """A waiting, half prefilled or decoding request."""
    one, at = engine(max_num_batched_tokens=1000), 0.0
    one.submit(ask(1, 1500, 50), now=0.0)
    for _ in range(steps_before):
        step = one.step(at)
        assert step is not None
        at = step.ends_at
    used = one.kv_usage > 0
    assert (used, one.abort(1), one.kv_usage, one.unfinished, one.step(at)) == (steps_before > 0, True, 0.0, 0, None)


def test_an_abort_of_an_ended_request_changes_nothing():
    """The result is False."""
    one = engine()
    one.submit(ask(1, 100), now=0.0)
    run(one)
    assert (one.abort(1), one.abort("never seen")) == (False, False)


def test_the_newest_request_is_preempted_when_decoding_needs_a_block():
    """LIFO: the older request goes on, the newer one is recomputed and still gets all tokens."""
    one = engine(kv_tokens=320)
    one.submit(ask("old", 128, 150), now=0.0)
    one.submit(ask("new", 128, 60), now=0.0)
    steps = run(one)
    ended = [finished for step in steps for finished in step.finished]
    tokens = [sum(step.tokens.count(id) for step in steps) for id in ("old", "new")]
    assert [(f.id, f.output_tokens, f.preemptions) for f in ended] == [("old", 150, 0), ("new", 60, 1)]
    assert (tokens, firsts(steps), one.preemptions) == ([150, 60], ["old", "new"], 1)


def test_a_preempted_request_is_next_and_nothing_is_admitted_in_its_step():
    """The request goes to the head of the queue, although the next one would fit at once."""
    one = engine(kv_tokens=320)
    for id, prompt, output in (("old", 128, 150), ("new", 128, 60)):
        one.submit(ask(id, prompt, output), now=0.0)
    steps, at = [], 0.0
    while not one.preemptions:
        step = one.step(at)
        assert step is not None
        steps.append(step)
        at = step.ends_at
        if len(steps) == 2:
            one.submit(ask("third", 170, 2), now=at)
    served = [id for step in run(one, at) for id in step.tokens if id != "old"]
    assert (steps[-1].tokens, steps[-1].prefill_tokens, served[0]) == (("old",), 0, "new")


def test_a_request_larger_than_the_cache_is_an_error():
    """Such a request could only wait for ever."""
    with pytest.raises(ValueError, match="request 1 is larger than the KV cache of 320 tokens"):
        engine(kv_tokens=320).submit(ask(1, 300, 21), now=0.0)


# ------------------------------------------------------------------- LoRA adapters


def test_a_request_without_a_place_for_its_adapter_lets_others_pass():
    """In the order of arrival among those of an adapter that runs, as vLLM skips over `max_loras`."""
    one = Engine(quiet(), adapters=LoraAdapters(set("ab"), slots=1, load=0.0))
    for id, (adapter, output) in enumerate([("a", 3), ("b", 1), ("a", 1), ("a", 1)], 1):
        one.submit(replace(ask(id, 100, output), adapter=adapter), now=0.0)
    assert firsts(run(one)) == [1, 3, 4, 2]


def test_a_request_that_comes_later_passes_one_without_a_place():
    """While the engine decodes: a queue that nobody could leave is looked at again."""
    one = VirtualEngine(Engine(quiet(), adapters=LoraAdapters(set("ab"), slots=1, load=0.0)))
    for id, adapter, at in ((1, "a", 0.0), (2, "b", 0.0), (3, "a", 1.0)):
        one.run_until(at)
        one.submit(replace(ask(id, 100, 400 if id == 1 else 1), adapter=adapter), at)
    begun = [event for event in one.run_until(60.0) if isinstance(event, EngineFirstToken)]
    assert [event.id for event in begun] == [3, 2]
    assert begun[0].at == pytest.approx(1.0, abs=0.05)


# ------------------------------------------------------------------- fast-forward

ADAPTERS = ("a", "b", "c", "")  # the last: the model itself
workloads = st.lists(
    st.tuples(st.floats(0, 0.2), st.integers(1, 700), st.integers(1, 120), st.integers(0, 2), st.booleans()),
    min_size=1,
    max_size=25,
)


def single_steps(one: Engine, clock: float, until: float) -> tuple[list[EngineFirstToken | Finished], float]:
    events: list[EngineFirstToken | Finished] = []
    while (start := one.wakes_at(clock)) is not None and start < until:
        step = one.step(start)
        if step is not None:
            events += [*step.first, *step.finished]
            clock = step.ends_at
    return events, clock


@settings(max_examples=60, deadline=None)
@given(workloads, st.integers(0, 9))
def test_fast_forward_equals_step_by_step(workload: list[tuple[float, int, int, int, bool]], seed: int):
    """Every event at the same time to the last bit, under preemption, hits, aborts, full batches and LoRA adapters."""
    profile = quiet(sigma=0.05, overhead=0.015, kv_tokens=1024, max_num_seqs=6, max_num_batched_tokens=256)
    slow, other = (Engine(profile, seed, LoraAdapters(set(ADAPTERS), slots=2, load=0.05)) for _ in range(2))
    fast = VirtualEngine(other)
    now, clock = 0.0, 0.0
    expected: list[Any] = []
    seen: list[Any] = []
    for id, (gap, prompt, output, name, leaves) in enumerate(workload):
        now += gap
        events, clock = single_steps(slow, clock, now)
        expected += events
        seen += fast.run_until(now)
        for target in (slow, fast):
            target.submit(replace(ask(id, prompt, output, name=name), adapter=ADAPTERS[prompt % 4]), now)
            if leaves:
                target.abort(id - 1)
    expected += single_steps(slow, clock, 1e9)[0]
    seen += fast.run_until(1e9)
    aborted = {id - 1 for id, (*_, leaves) in enumerate(workload) if leaves}
    assert [e for e in seen if e.id not in aborted] == [e for e in expected if e.id not in aborted]
    assert (fast.engine.kv_usage, slow.kv_usage, fast.engine.unfinished) == (0.0, 0.0, 0)


def test_fast_forward_takes_many_steps_at_once():
    """A lone answer of 500 tokens is two results: the prefill, and all decode steps."""
    one = virtual()
    one.submit(ask(1, 100, 500), now=0.0)
    events = one.run_until(60.0)
    assert (one.steps, [type(event) for event in events]) == (500, [EngineFirstToken, Finished])


# ------------------------------------------------------------------- offloaded blocks


def offloaded(*prompts: int) -> VirtualEngine:
    """An engine whose host holds prompts of so many tokens, named by their number; its GPU holds none of them."""
    one = virtual(kv_tokens=8_192, host_tokens=65_536, load_us=10.0)
    for name, tokens in enumerate(prompts):
        one.submit(ask(f"first {name}", tokens, name=name), now=0.0)
        one.run_until(50.0)
    one.submit(ask("other", 8_191), now=60.0)
    one.run_until(90.0)
    return one


def test_offloaded_blocks_are_loaded_and_not_computed():
    """The first token is late by the load alone, and cached tokens count them."""
    one = offloaded(4_001)
    one.submit(ask("again", 4_001, name=0), now=100.0)
    [first, _] = one.run_until(200.0)
    computed = seconds(one.engine.profile, 1, 1, pairs=4_000.5)
    assert first.cached_tokens == 4_000
    assert first.at - 100.0 == pytest.approx(4_000 * 10e-6 + computed)


def test_loads_share_a_link_and_leave_the_engine_to_others():
    """The second load begins at the end of the first; a new prompt is computed meanwhile."""
    one = offloaded(2_001, 2_001)
    for name in (0, 1):
        one.submit(ask(f"again {name}", 2_001, name=name), now=100.0)
    one.submit(ask("new", 16), now=100.0)
    first = {event.id: event.at - 100.0 for event in one.run_until(200.0) if isinstance(event, EngineFirstToken)}
    assert first["new"] < 0.02 <= first["again 0"] < 0.04 <= first["again 1"]


def test_a_request_that_is_dropped_during_its_load_leaves_the_engine_idle():
    one = offloaded(4_001)
    one.submit(ask("again", 4_001, name=0), now=100.0)
    one.run_until(100.01)
    assert one.abort("again")
    assert one.run_until(200.0) == []
    assert (one.engine.unfinished, one.engine.wakes_at(200.0)) == (0, None)
