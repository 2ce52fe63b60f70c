import pytest

from backends.server_profiles import PROFILES, EngineProfile

# ms: a prefill of 8192 tokens, a decode step of one sequence at 1,000 tokens, of 64 at 2,000 each
PUBLISHED = {
    "8b-h100": (217, 6.8, 16.8),
    "8b-a100": (655, 10.3, 26.7),
    "8b-l4": (2322, 60, 147),
    "32b-2xh100": (516, 15.1, 26.2),
    "70b-4xh100": (588, 17.0, 25.4),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_steps_take_as_long_as_published(name: str):
    """The formula gives the published step times of every engine profile within 1%."""
    profile = PROFILES[name]
    assert isinstance(profile, EngineProfile)
    took = (
        profile.duration_ms(8192, 1, pairs=8192 * 8192 / 2),
        profile.duration_ms(1, 1, context=1000),
        profile.duration_ms(64, 64, context=64 * 2000),
    )
    assert took == pytest.approx(PUBLISHED[name], rel=0.01)


def test_every_engine_holds_its_longest_prompt():
    """A prompt of max_model_len fits into the KV cache, so no request can wait for ever."""
    engines = [profile for profile in PROFILES.values() if isinstance(profile, EngineProfile)]
    assert [p.name for p in engines if p.max_model_len > p.num_blocks * p.block_size] == []
