"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("firsttoken", deadline=None)  # how long an example takes depends on the test machine's load
settings.load_profile("firsttoken")
