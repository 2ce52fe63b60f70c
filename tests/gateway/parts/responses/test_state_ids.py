"""Ids of state kept by backends: sealed for a caller, opened on any replica, worthless to anybody else."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.translation.turn_state.seals import FOREIGN, sealed
from gateway.api.api_error import ApiError
from gateway.parts.responses.state_ids import SEAL, Home, OpenedState, StateHolder, StateIds, open_request, seal_key

ENDPOINTS = ["large/10.0.1.11:8000", "small/10.0.0.11:8000", "small/10.0.0.12:8000"]
HOMES = {name: Home(name.partition("/")[0], f"maker-{name[:5]}") for name in ENDPOINTS}
SECRET = b"of the configuration"


def ids(tenant: str = "web", secret: bytes = SECRET) -> StateIds:
    return StateIds(seal_key(secret, tenant))


BACKEND_ID = st.one_of(
    st.from_regex(r"(resp|conv|msg|rs)_[0-9a-zA-Z-]{1,64}", fullmatch=True), st.text(min_size=1, max_size=64)
)


@given(BACKEND_ID, st.sampled_from(ENDPOINTS))
def test_an_id_leads_back_to_its_endpoint_on_every_replica(backend_id: str, endpoint: str) -> None:
    sealed = ids().seal(backend_id, endpoint)
    assert ids().open(sealed, ENDPOINTS) == StateHolder(endpoint, backend_id)
    assert ids().seal(backend_id, endpoint) == sealed


@given(st.text(min_size=1, max_size=5000), st.sampled_from(ENDPOINTS))
def test_encrypted_content_leads_back_to_its_endpoint(content: str, endpoint: str) -> None:
    sealed = ids().seal_content(content, endpoint)
    assert ids().open_content(sealed, ENDPOINTS) == StateHolder(endpoint, content)


@given(BACKEND_ID, st.data())
def test_a_changed_id_is_unknown(backend_id: str, data: st.DataObject) -> None:
    sealed = ids().seal(backend_id, ENDPOINTS[0])
    at = data.draw(st.integers(0, len(sealed) - 1))
    changed = sealed[:at] + data.draw(st.characters().filter(lambda other: other != sealed[at])) + sealed[at + 1 :]
    assert ids().open(changed, ENDPOINTS) is None


@given(st.text(max_size=100))
def test_an_id_that_was_never_given_out_is_unknown(invented: str) -> None:
    assert ids().open(invented, ENDPOINTS) is None
    assert ids().open_content(invented, ENDPOINTS) is None


def test_an_id_of_another_tenant_or_secret_is_unknown() -> None:
    sealed = ids("web").seal("resp_1", ENDPOINTS[0])
    assert ids("batch").open(sealed, ENDPOINTS) is None
    assert ids("web", b"another").open(sealed, ENDPOINTS) is None


def test_an_id_of_an_endpoint_that_is_gone_is_unknown() -> None:
    assert ids().open(ids().seal("resp_1", ENDPOINTS[0]), ENDPOINTS[1:]) is None


def test_a_backend_s_own_id_is_unknown() -> None:
    assert ids().open("resp_68e1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f607", ENDPOINTS) is None


def test_an_id_is_no_content_and_a_content_no_id() -> None:
    """A seal says what it was made for."""
    assert ids().open_content(ids().seal("x", ENDPOINTS[0]), ENDPOINTS) is None
    assert ids().open(ids().seal_content("x", ENDPOINTS[0]), ENDPOINTS) is None


@pytest.mark.parametrize("backend_id", ["resp_abc", "conv_1", "chatcmpl-1"])
def test_an_id_keeps_its_prefix_and_tells_nothing_of_the_endpoint(backend_id: str) -> None:
    """And needs no escapes in a path, where the backend's own needs none."""
    sealed = ids().seal(backend_id, ENDPOINTS[0])
    assert re.fullmatch(r"[A-Za-z0-9_-]+", sealed)
    assert sealed.startswith(("resp_", "conv_")) == backend_id.startswith(("resp_", "conv_"))
    assert len(sealed) == len(backend_id) + SEAL
    assert not any(word in sealed for word in ("large", "10.0", "8000"))


# -- requests --------------------------------------------------------------------------------


def refused(body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        open_request(body, ids(), HOMES)
    return refusal.value


def reasoning(content: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": content}


def compaction(content: str) -> dict[str, Any]:
    return {"type": "compaction", "encrypted_content": content}


def test_a_request_gets_the_backend_s_ids_back_and_its_endpoint() -> None:
    seal, content = ids().seal, ids().seal_content("gAAAA", ENDPOINTS[1])
    said = {"role": "user", "content": "hi"}
    body = {
        "model": "m",
        "previous_response_id": seal("resp_1", ENDPOINTS[1]),
        "conversation": {"id": seal("conv_1", ENDPOINTS[1])},
        "input": [said, compaction(content)],
    }
    before = json.dumps(body)
    opened = open_request(body, ids(), HOMES)
    assert opened.pinned == ENDPOINTS[1]
    assert opened.body == {
        "model": "m",
        "previous_response_id": "resp_1",
        "conversation": {"id": "conv_1"},
        "input": [said, compaction("gAAAA")],
    }
    assert json.dumps(body) == before  # parsed bodies are shared


def test_reasoning_is_sealed_for_its_maker_and_holds_a_request_at_no_pool() -> None:
    """Of a pool's endpoints the one with the latest reads it: what another of the pool has made is for nobody."""
    given = [ENDPOINTS[1], ENDPOINTS[0], ENDPOINTS[2]]
    body = {"input": [reasoning(ids().seal_content("gAAAA", endpoint)) for endpoint in given]}
    opened = open_request(body, ids(), HOMES)
    contents = [item["encrypted_content"] for item in opened.body["input"]]
    assert contents == [FOREIGN, sealed("maker-large", "gAAAA"), sealed("maker-small", "gAAAA")]
    assert (opened.pinned, opened.has_turns) == ("", True)
    assert opened.readers == {"large": ENDPOINTS[0], "small": ENDPOINTS[2]}


@pytest.mark.parametrize("content", ["gAAAA", ids("other").seal_content("gAAAA", ENDPOINTS[0])])
def test_reasoning_that_no_backend_of_the_request_has_made_is_for_nobody(content: str) -> None:
    """A session may come from another model, and from another gateway."""
    opened = open_request({"input": [reasoning(content)]}, ids(), HOMES)
    assert [item["encrypted_content"] for item in opened.body["input"]] == [FOREIGN]
    assert (opened.pinned, opened.readers) == ("", {})


def test_where_a_request_is_held_at_an_endpoint_that_one_reads_the_reasoning_of_its_pool() -> None:
    contents = [ids().seal_content("gAAAA", endpoint) for endpoint in ENDPOINTS]
    body = {"previous_response_id": ids().seal("resp_1", ENDPOINTS[1]), "input": [*map(reasoning, contents)]}
    opened = open_request(body, ids(), HOMES)
    assert opened.readers["small"] == opened.pinned == ENDPOINTS[1]
    found = [item["encrypted_content"] for item in opened.body["input"]]
    assert found[1:] == [sealed("maker-small", "gAAAA"), FOREIGN]


@pytest.mark.parametrize(
    "body",
    [
        {"input": "hi"},
        {"input": [{"role": "user", "content": "hi"}, {"type": "reasoning", "encrypted_content": None}]},
        {"previous_response_id": None, "conversation": None, "input": 5},
    ],
)
def test_a_request_without_state_is_left_as_it_is(body: dict[str, Any]) -> None:
    assert open_request(body, ids(), HOMES) == OpenedState(body)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_not_found", "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation_not_found", "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation_not_found", "conversation"),
        ({"input": [compaction("gAAAA")]}, "invalid_encrypted_content", "input[0].encrypted_content"),
    ],
)
def test_an_unknown_id_is_not_found(body: dict[str, Any], code: str, param: str) -> None:
    refusal = refused(body)
    assert (refusal.status, refusal.code, refusal.param) == (404, code, param)
    assert refusal.logged == code  # ids are not logged


def test_state_of_two_backends_fits_none() -> None:
    body = {
        "previous_response_id": ids().seal("resp_1", ENDPOINTS[0]),
        "input": [compaction(ids().seal_content("gAAAA", ENDPOINTS[1]))],
    }
    assert (refused(body).status, refused(body).param) == (400, "input[0].encrypted_content")
