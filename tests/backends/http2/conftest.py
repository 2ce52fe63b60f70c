from __future__ import annotations

import pytest

from tests.support.http2_peer import Peer


@pytest.fixture
def peer() -> Peer:
    return Peer()
