from statistics import mean

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from lab.servers.reply import Function, OutputSpec, call_tool, write_text
from tests.support.engine_builders import encode

LONG = OutputSpec(limit=100_000)


def test_the_same_prompt_gets_the_same_answer():
    """From any engine of a pool: only the prompt's seed decides."""
    assert (write_text(1, LONG) == write_text(1, LONG), write_text(1, LONG) == write_text(2, LONG)) == (True, False)


def test_answers_have_150_tokens_in_the_mean():
    """Log-normal lengths where the caller sets no limit."""
    assert 140 < mean(len(write_text(seed, LONG).pieces) for seed in range(3000)) < 160


def test_a_token_limit_sets_the_finish_reason_length():
    """finish_reason is length if the answer would have been longer, else stop."""
    cut, whole = write_text(1, OutputSpec(limit=5)), write_text(1, LONG)
    assert (cut.pieces, cut.finish, whole.finish) == (whole.pieces[:5], "length", "stop")


def test_min_tokens_and_ignore_eos_set_the_length():
    """As vLLM's sampling parameters do."""
    assert len(write_text(1, OutputSpec(2000, at_least=1500)).pieces) == 1500
    assert len(write_text(1, OutputSpec(2000, ignore_eos=True)).pieces) == 2000


@given(st.integers(0, 1000), st.integers(1, 60))
def test_a_broken_answer_is_continued_at_its_end(seed: int, given_words: int):
    """The beginning and the rest are the whole."""
    whole = write_text(seed, OutputSpec(80, ignore_eos=True))
    begun = "".join(whole.pieces[:given_words])
    rest = write_text(seed, OutputSpec(80 - given_words, ignore_eos=True), begun)
    assert begun + rest.text == whole.text


def test_every_piece_is_one_token_of_the_text():
    """Streamed pieces add up to the text which the next turn encodes."""
    reply = write_text(5, LONG)
    assert len(encode(reply.text)) == len(reply.pieces)


def test_a_tool_call_has_arguments_that_fit_the_schema():
    """Every property gets a value of the right type."""
    properties = {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "boolean"}},
    }
    reply = call_tool(Function("weather", {"type": "object", "properties": properties}), LONG)
    arguments = {"city": "water", "days": 7, "unit": "C", "tags": [True]}
    assert (msgspec.json.decode(reply.content), reply.finish) == (arguments, "tool_calls")


def test_a_tool_call_may_be_cut_by_max_tokens():
    """The arguments are incomplete, and finish_reason is `length`."""
    reply = call_tool(Function("f", {"type": "object", "properties": {"a": {"type": "string"}}}), OutputSpec(2))
    assert (reply.content, reply.finish) == ('{"a"', "length")
