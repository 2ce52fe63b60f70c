from hypothesis import given
from hypothesis import strategies as st

from lab.engines.engine import DecodeBatch, LiveRequest
from tests.support.engine_builders import ask

SIZE = 4


def prefilled(id: int, prompt: int, output: int) -> LiveRequest:
    live = LiveRequest(ask(id, prompt, output, size=SIZE), 0.0, prompt, [])
    live.computed, live.generated = prompt, 1
    return live


joins = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20), st.integers(2, 15)), min_size=1, max_size=8)


@given(joins)
def test_the_batch_counts_as_if_every_request_were_looked_at_in_every_step(joins: list[tuple[int, int, int]]):
    """Contexts, needed blocks and endings equal those of a plain loop over all requests."""
    batch, plain = DecodeBatch(SIZE), {}
    for id, (wait, prompt, output) in enumerate(joins):
        for _ in range(wait):
            expected_need = sum(context % SIZE == 0 for context, _ in plain.values())
            expected_context = sum(context for context, _ in plain.values())
            assert (batch.blocks_needed, batch.context) == (expected_need, expected_context)
            plain = {key: (context + 1, left - 1) for key, (context, left) in plain.items()}
            ended = {key for key, (_, left) in plain.items() if left == 0}
            plain = {key: value for key, value in plain.items() if key not in ended}
            assert {live.request.id for live in batch.decode(1)} == ended
        plain[id] = (prompt, output - 1)
        batch.join(prefilled(id, prompt, output))


def test_a_request_that_leaves_early_keeps_its_token_counts():
    """A preemption or an abort finds the computed and the generated tokens."""
    batch, live = DecodeBatch(SIZE), prefilled(1, 10, 50)
    batch.join(live)
    batch.decode(7)
    batch.leave(live)
    assert (live.computed, live.generated, len(batch), batch.context, batch.due) == (17, 8, 0, 0, {})
