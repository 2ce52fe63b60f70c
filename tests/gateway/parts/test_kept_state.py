"""The part that keeps requests with the state of an endpoint: when it refuses a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from backends.interface import Operation
from gateway.api.api_error import ApiError
from gateway.config.models import Config
from gateway.core.hooks import Ask, RoutePlan
from gateway.parts.responses.kept_state import KeptState
from gateway.runtime import build_runtime
from tests.support.gateways import document, pool

RUNTIME = build_runtime(Config.model_validate(document({"small": pool("http://127.0.0.1:9")})))


async def test_a_thread_that_the_route_cannot_keep_is_refused_as_soon_as_the_route_is_known() -> None:
    """Before the body is translated for other dialects, and before comments may fix the status."""
    part = KeptState(cast("Any", SimpleNamespace(decider=None)))
    hooks = part.on(RoutePlan(RUNTIME, RUNTIME.routes.all[0], Operation.MESSAGES))
    asked = SimpleNamespace(operation=Operation.MESSAGES, body={"thread": {"type": "create"}})
    assert hooks.read is not None
    with pytest.raises(ApiError) as refused:
        await hooks.read(cast("Ask", SimpleNamespace(request=asked)))
    assert refused.value.status == 400
