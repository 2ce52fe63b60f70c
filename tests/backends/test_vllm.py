"""vLLM and SGLang: request fields, and metrics pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.catalog import KINDS, build
from backends.interface import BackendConfig, BackendRequest, FailureKind, HttpCall, Operation
from backends.vllm import SGLang, Vllm

TRANSCRIPTS = Path(__file__).parent / "transcripts"
VLLM, SGLANG = Vllm(BackendConfig("vllm", "m")), SGLang(BackendConfig("sglang", "m"))


def sent(backend: Vllm, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [], "cache_salt": "the caller's", "priority": 9}
    forward = BackendRequest(**{"operation": Operation.CHAT, "body": body, "model": "m", "stream": False, **fields})
    decoded: dict[str, Any] = json.loads(backend.call(forward).body)
    return decoded


def page(*lines: str) -> bytes:
    return "\n".join(lines).encode()


def test_the_gateways_salt_and_priority_overwrite_the_callers() -> None:
    """A caller with a free choice of salt could probe another tenant's cache. Without tenants, a caller's salt only
    divides the shared cache, and passes."""
    call = sent(VLLM, cache_salt="ab12", priority=0)
    assert (call["cache_salt"], call["priority"]) == ("ab12", 0)
    assert sent(VLLM)["cache_salt"] == "the caller's"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_only_backends_with_cache_salts_receive_a_salt(kind: str) -> None:
    """OpenAI refuses unknown fields."""
    backend = build(BackendConfig(kind, "m", api_key="sk-backend"))
    forward = BackendRequest(Operation.CHAT, {"messages": [], "cache_salt": "the caller's"}, "m", stream=False)
    salts = [
        json.loads(backend.call(one).body).get("cache_salt") for one in (forward, replace(forward, cache_salt="ab"))
    ]
    assert salts == (["the caller's", "ab"] if kind in ("vllm", "sglang", "simulated") else [None, None])
    assert backend.salted is (salts[1] is not None)


def test_a_caller_cannot_name_another_attempt_in_kv_events() -> None:
    """vLLM prefers the body's `session_id` to the header's."""
    body = {"messages": [], "session_id": "req-of-another"}
    assert "session_id" not in sent(VLLM, body=body, session_id="req-mine")
    assert sent(VLLM, body=body)["session_id"] == "req-of-another"


def test_an_engine_receives_the_session_id_of_its_kv_events() -> None:
    """If the gateway reads KV events."""
    forward = BackendRequest(Operation.CHAT, {"messages": []}, "m", stream=False)
    names = [dict(VLLM.call(one).headers).get("x-session-id") for one in (forward, replace(forward, session_id="r-2"))]
    assert names == [None, "r-2"]


def test_the_default_limit_is_max_tokens() -> None:
    """Known to every version."""
    assert sent(VLLM, max_tokens=7)["max_tokens"] == 7


def test_an_engine_has_a_probe_and_a_load_page() -> None:
    """Queue and cache are visible, so the engine is modelled."""
    assert (VLLM.local, VLLM.probe(), VLLM.load()) == (True, HttpCall("GET", "/health"), HttpCall("GET", "/metrics"))


def test_a_real_page_of_vllm_is_read() -> None:
    """vLLM 0.32, one idle engine."""
    assert VLLM.read_load((TRANSCRIPTS / "vllm_metrics.txt").read_bytes()) == {
        "running": 0,
        "waiting": 0,
        "kv_usage": 0.0,
        "block_size": 32,
        "kv_blocks": 4096,
        "started_at": 1795228643.8,
        "prefix_queries": 789.0,
        "prefix_hits": 416.0,
        "preemptions": 0.0,
        "drafted": None,
        "accepted": None,
        "asleep": 0.0,
        "rejections": 0.0,
    }


def test_tokens_of_speculative_decoding_are_read() -> None:
    """Totals since the start, by vLLM with a draft model."""
    load = VLLM.read_load(
        page(
            'vllm:spec_decode_num_drafts_total{engine="0"} 100.0',
            'vllm:spec_decode_num_draft_tokens_total{engine="0"} 300.0',
            'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 210.0',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 90.0',
        )
    )
    assert (load["drafted"], load["accepted"]) == (300.0, 210.0)


def test_data_parallel_ranks_are_summed() -> None:
    """Ranks share an address: requests and blocks are summed, usage is averaged."""
    load = VLLM.read_load(
        page(
            'vllm:num_requests_running{engine="0"} 3.0',
            'vllm:num_requests_running{engine="1"} 4.0',
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0',
            'vllm:num_requests_waiting{engine="0"} 1.0',
            'vllm:num_requests_waiting{engine="1"} 1.0',
            'vllm:kv_cache_usage_perc{engine="0"} 0.5',
            'vllm:kv_cache_usage_perc{engine="1"} 0.7',
            'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100",num_gpu_blocks_override="7"} 1.0',
            'vllm:cache_config_info{block_size="16",x_num_gpu_blocks="9",num_gpu_blocks="200",engine="1"} 1.0',
        )
    )
    assert [load[name] for name in ("running", "waiting", "block_size", "kv_blocks")] == [7, 2, 16, 300]
    assert load["kv_usage"] == pytest.approx(0.6)


def test_older_metric_names_are_read() -> None:
    """Before 0.9 the KV cache was named the GPU's."""
    load = VLLM.read_load(page('vllm:gpu_cache_usage_perc{model_name="m"} 0.25 1795228643800'))
    assert load["kv_usage"] == 0.25


def test_labels_may_contain_any_text() -> None:
    """A model name with braces, spaces and digits is a label."""
    assert VLLM.read_load(page('vllm:num_requests_running{model_name="a} 9 {b 1"} 2.0'))["running"] == 2


@pytest.mark.parametrize("value", ["NaN", "+Inf", "many", "", "{"])
def test_an_invalid_number_is_none(value: str) -> None:
    """A broken page is no load, and no error."""
    assert VLLM.read_load(page(f"vllm:num_requests_running {value}", "x 1"))["running"] is None


def test_figures_that_no_number_holds_are_not_reported() -> None:
    """Two engines behind one page; Python converts no text of 4,300 digits, and no infinity, to an integer."""
    huge = [f'vllm:num_requests_running{{engine="{rank}"}} 1e308' for rank in (0, 1)]
    info = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{"9" * 5000}"}} 1'
    load = VLLM.read_load(page(*huge, info, "x 1"))
    assert (load["running"], load["block_size"], load["kv_blocks"]) == (None, 16, None)


@given(st.binary(max_size=200), st.integers(0, 9000))
def test_no_page_breaks_the_reader(noise: bytes, cut: int) -> None:
    """Random bytes, and a real page with random bytes in the middle."""
    real = (TRANSCRIPTS / "vllm_metrics.txt").read_bytes()
    VLLM.read_load(noise)
    VLLM.read_load(real[:cut] + noise + real[cut:])


@pytest.mark.parametrize(
    "capacity",
    [
        ('sglang:cache_config_info{page_size="64",num_pages="1000"} 1.0',),
        ('sglang:page_size{model_name="m"} 64.0', 'sglang:max_total_num_tokens{model_name="m"} 64000.0'),
    ],
)
def test_a_page_of_sglang_is_read(capacity: tuple[str, ...]) -> None:
    """Older versions have the capacity in labels, newer in gauges."""
    load = SGLANG.read_load(
        page(
            'sglang:num_running_reqs{model_name="m",tp_rank="0"} 2.0',
            'sglang:num_queue_reqs{model_name="m",tp_rank="0"} 5.0',
            'sglang:token_usage{model_name="m"} 0.28',
            'sglang:prompt_tokens_total{model_name="m"} 8.1e+06',
            'sglang:cached_tokens_total{model_name="m"} 4.0e+06',
            *capacity,
        )
    )
    assert load == {
        "running": 2,
        "waiting": 5,
        "kv_usage": 0.28,
        "block_size": 64,
        "kv_blocks": 1000,
        "started_at": None,
        "prefix_queries": 8.1e6,
        "prefix_hits": 4.0e6,
        "preemptions": None,
        "drafted": None,
        "accepted": None,
        "asleep": None,
        "rejections": None,
    }


def adapted(kind: type[Vllm] = Vllm) -> Vllm:
    return kind(BackendConfig(kind.__name__.lower(), "m", adapters=frozenset({"sql", "support"})))


def test_an_adapter_is_named_as_the_engine_knows_it() -> None:
    """vLLM takes its name as the model. SGLang would answer with the model itself, and takes `lora_path` too."""
    body = {"messages": [], "lora_path": "support"}
    assert sent(adapted(), model="sql")["model"] == "sql"
    for model, expected in (("sql", "m:sql"), ("m", "m")):
        call = sent(adapted(SGLang), model=model, body=body)
        assert (call["model"], "lora_path" in call) == (expected, False)
    assert sent(SGLANG, body=body)["lora_path"] == "support"


@pytest.mark.parametrize(
    "message",
    [
        "LoRA adapter 'sql' was requested, but LoRA is not enabled. Please launch the server with --enable-lora flag",
        "Got LoRA adapter that has never been loaded: sql\nAll loaded adapters: dict_keys([]).",
        "The following requested LoRA adapters are not loaded: sql\nLoaded adapters: dict_keys([]).",
    ],
)
def test_an_adapter_that_sglang_has_not_loaded_is_a_fault_of_the_configuration(message: str) -> None:
    """Except where callers may name adapters: any of them could take the engine out of use."""
    body = json.dumps(
        {"object": "error", "message": message, "type": "BadRequest", "param": None, "code": 400}
    ).encode()
    assert adapted(SGLang).failure(400, {}, body).kind is FailureKind.MISCONFIGURED
    assert SGLANG.failure(400, {}, body).kind is FailureKind.CLIENT


def test_the_latest_series_of_adapters_is_read() -> None:
    """vLLM keeps a series for each set of adapters that it has ever run; the value is the time."""
    series = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="%s",waiting_lora_adapters="%s"} %s'
    lines = (series % ("support", "", 1.7e9), series % ("sql,other", "support", 1.8e9), series % ("", "", 1.6e9))
    assert adapted().read_adapters(page(*lines)) == (("sql",), 4)
    assert VLLM.read_adapters(page(*lines)) == ((), None)
    assert adapted().read_adapters(page("vllm:num_requests_running 1.0")) == ((), None)
    assert adapted().read_adapters(page(series % (",".join(["sql"] * 500), "", 1.0)))[0] == ("sql",) * 16


def test_long_names_of_adapters_are_bounded_together() -> None:
    """Every worker gets them twice a second."""
    names = [f"{number:02}" + "x" * 98 for number in range(16)]
    engine = Vllm(BackendConfig("vllm", "m", adapters=frozenset(names)))
    text = f'vllm:lora_requests_info{{max_lora="16",running_lora_adapters="{",".join(names)}"}} 1.0'
    found, slots = engine.read_adapters(page(text))
    assert (list(found), slots) == (names[:4], 16)


LIMITED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_completion_tokens": 30,
    "min_tokens": 9,
}


def test_the_tokens_of_a_text_come_off_all_limits() -> None:
    """20 tokens in 4 events leave 10 of 30, not 26."""
    backend = Vllm(BackendConfig("vllm", "m"))
    forward = BackendRequest(Operation.CHAT, LIMITED, "m", stream=True, max_tokens=40)
    rest = backend.continued(forward, "twenty tokens", 20)
    assert (rest.body["max_completion_tokens"], rest.body["min_tokens"], rest.max_tokens) == (10, 0, 20)
    assert backend.obstacle(forward, 29) == ""
    assert backend.obstacle(forward, 30) == "the limit of the output"


@pytest.mark.parametrize(
    ("fields", "cap", "counts"),
    [({}, None, False), ({"max_tokens": 9}, None, True), ({}, 9, True), ({"min_tokens": 9}, None, True)],
)
def test_a_text_is_counted_where_a_limit_asks_for_it(fields: dict[str, Any], cap: int | None, counts: bool) -> None:
    """Without special tokens, which are no part of an answer."""
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    call = Vllm(BackendConfig("vllm", "m")).count_text(
        BackendRequest(Operation.CHAT, body, "small", stream=True, max_tokens=cap), "the text"
    )
    assert (call is not None) is counts
    if call is not None:
        assert (call.method, call.path) == ("POST", "/tokenize")
        assert json.loads(call.body) == {"prompt": "the text", "add_special_tokens": False, "model": "small"}
