"""Engines fitted to an access log: the log of a replay is fitted, and the fit is compared with what was replayed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backends.server_profiles import PROFILES, EngineProfile, Profile
from gateway.cli.main import main
from lab.commands import add_commands
from lab.engines.engine_events import EngineRequest
from lab.engines.virtual_engine import HostedApi, RecordedApi
from lab.replay.engine_fit import SAMPLES, FittedEngine, fitted, scaled
from lab.replay.from_log import LoggedAttainment
from lab.replay.player import play
from lab.replay.replay_html import write_html
from lab.replay.results import RequestResult
from lab.replay.sim_fleet import Scenario
from lab.traffic.access_log import LANDMARK, LoggedAttempt, LoggedRequest
from lab.traffic.traces import Arrival, logged_arrivals
from tests.support.replay_builders import pool, route

L4 = PROFILES["8b-l4"]
assert isinstance(L4, EngineProfile)
SLOW = replace(scaled(L4, (1.6, 1.2, 1.0, 1.0)), kv_tokens=60_000)
MAIN = pool(engines=1)


def lived(count: int, profile: Profile, rate: float = 1.0, kv: int = 60_000) -> list[LoggedRequest]:
    """The log of requests that an engine of this profile has answered."""
    random, at, arrivals = Random(3), 0.0, list[Arrival]()
    for number in range(count):
        at += random.expovariate(rate)
        tokens = int(random.uniform(300, 2_500))
        marks = range(number << 20, (number << 20) + tokens // LANDMARK)
        arrivals.append(Arrival(at, tokens, int(random.uniform(5, 60)), marks, "agent", block=LANDMARK))
    scenario = Scenario(
        (MAIN,), {"agent": route(ttft={"budget": "30s"}, tpot="off", on_miss="best_effort")}, {"main/0": profile}
    )
    results = play(scenario, arrivals).requests
    return [_line(result, arrivals[result.number - 1], kv) for result in results]


def _line(result: RequestResult, arrival: Arrival, kv: int) -> LoggedRequest:
    assert result.sent_at is not None
    assert result.ended_at is not None
    ends = result.sent_at - result.arrived, result.ended_at - result.arrived
    attempt = LoggedAttempt(result.endpoint, *ends, "completed", kv)
    told = arrival.prompt_tokens, arrival.output_tokens, None, arrival.hashes, result.cached, True
    upstream, tpot = result.upstream, result.tpot
    fixed = (result.number, 1e9 + result.arrived, "agent", "", True, "completed")
    return LoggedRequest(*fixed, *told, result.endpoint, upstream, tpot, (attempt,), None)


def fit(requests: list[LoggedRequest]) -> FittedEngine:
    return fitted(requests, logged_arrivals(requests), [MAIN])["main/0"]


def seconds(profile: Profile, tokens: int, decoding: int = 0) -> float:
    assert isinstance(profile, EngineProfile)
    return profile.duration_ms(tokens + decoding, 1 + decoding, tokens**2 / 2, decoding * 800) / 1e3


def test_an_altered_engine_is_found_from_its_log() -> None:
    """Of no known profile; prompts and answers take as long as they took, and the error is told."""
    found = fit(lived(60, SLOW))
    assert found.answers == 60
    assert found.ttft_error < 0.1
    assert found.tpot_error < 0.1
    for work in ((500, 0), (2_000, 0), (1, 10), (800, 10)):
        assert seconds(found.profile, *work) == pytest.approx(seconds(SLOW, *work), rel=0.2)


def test_the_kv_cache_is_the_recorded_one() -> None:
    """A gateway sends an engine no more than its cache holds: the times of its answers do not tell its size."""
    found = fit(lived(30, SLOW, kv=34_560)).profile
    assert isinstance(found, EngineProfile)
    assert found.kv_tokens == 34_560


def test_too_few_answers_are_not_fitted() -> None:
    """The profile is then assumed, as without a log."""
    requests = lived(SAMPLES - 1, SLOW)
    assert fitted(requests, logged_arrivals(requests), [MAIN]) == {}


def test_an_endpoint_without_answers_is_like_the_others_of_its_pool() -> None:
    """As one more engine, or the same one under another address."""
    requests = lived(30, SLOW)
    found = fitted(requests, logged_arrivals(requests), [pool(engines=2)])
    assert (found["main/1"].profile, found["main/1"].answers) == (found["main/0"].profile, 0)


def test_an_api_has_the_times_and_the_limit_of_its_log() -> None:
    """The limit is the most that it accepted in a minute, once it refused others."""
    requests = lived(60, PROFILES["api"], rate=4.0)
    api = [replace(MAIN, local=False)]
    found = fitted(requests, logged_arrivals(requests), api)["main/0"]
    assert found.profile.tpot_alone == pytest.approx(0.012, rel=0.1)
    assert getattr(found.profile, "requests_per_minute") > 10_000  # noqa: B009
    refused = replace(requests[-1], attempts=(replace(requests[-1].attempts[0], ending="rate_limited"),), upstream=None)
    limited = [*requests[:-1], refused]
    profile = fitted(limited, logged_arrivals(limited), api)["main/0"].profile
    assert getattr(profile, "requests_per_minute") == 59  # noqa: B009


def test_an_api_answers_as_it_did_at_that_time() -> None:
    """Its spread is most of the chance in an overload: each answer of the log is given once, others are drawn."""
    requests = lived(30, PROFILES["api"], rate=4.0)
    profile = fitted(requests, logged_arrivals(requests), [replace(MAIN, local=False)])["main/0"].profile
    assert isinstance(profile, RecordedApi)
    logged = [request.upstream for request in requests]
    for seed in (0, 1):
        api = HostedApi(profile, seed)
        times = [each.at - requests[0].at + each.attempts[0].opened for each in requests]
        given = [api.submit(EngineRequest(i, 100, 9), at).first_at - at for i, at in enumerate([*times, *times])]
        assert given[:30] == pytest.approx(logged, abs=1e-6)
        assert not {*given[30:]} & {*given[:30]}


# ---------------------------------------------------------------- the command


CONFIG = """\
pools: {main: {backend: simulated, model: m, endpoints: ["http://h0:80"]}}
routes: {chat: {tiers: [main], ttft: {budget: 1s}, tpot: "off", on_miss: best_effort}}
"""


def line(number: int, random: Random) -> Mapping[str, Any]:
    """A request that took 0.3 ms a token, and 20 ms for each token of its answer."""
    prompt = int(random.uniform(500, 2_000))
    ttft, tokens = prompt * 0.3, 20
    attempt = {"endpoint": "main/h0:80", "opened_ms": 1.0, "ended_ms": ttft + 400, "ending": "completed"}
    times = {"ttft_ms": ttft, "tpot_ms": 20.0, "stages_ms": {"relay": 0.1}, "ttft_met": ttft < 450}
    sizes = {"prompt_tokens_reported": prompt, "output_tokens": tokens, "endpoint": "main/h0:80"}
    return {"wall": number * 2.0, "route": "chat", "end": "completed", **sizes, **times, "attempts": [attempt]}


@pytest.fixture
def _files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.chdir(tmp_path)
    random = Random(1)
    Path("access.log").write_text("".join(json.dumps(line(number, random)) + "\n" for number in range(30)))
    Path("a.yaml").write_text(CONFIG)


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    lean = ("--config", "a.yaml", "--scorers", "none", "--no-reference")
    code = main(["replay", "access.log", *lean, *arguments], [add_commands])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err


@pytest.mark.usefixtures("_files")
def test_a_replay_of_an_access_log_tells_what_happened_and_how_well_its_engines_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first line is of the log; the engines are named with their error; a configured profile is not fitted."""
    code, out, err = replayed(capsys)
    assert code == 0
    assert out[0].startswith("as logged, chat: 70.0% met, ")
    assert out[0].endswith(", 30 requests with a TTFT budget")
    assert err.startswith("firsttoken: main/h0:80: ")
    assert "fitted to 30 answers of the log, first token within " in err
    assert "assuming" not in err
    Path("a.yaml").write_text(CONFIG.replace("model: m", "model: m, profile: 8b-h100"))
    assert replayed(capsys)[2] == ""


@pytest.mark.usefixtures("_files")
def test_a_what_if_is_one_more_row(capsys: pytest.CaptureFixture[str]) -> None:
    """A budget of a third is met by fewer requests; another engine harms none."""
    _, out, _ = replayed(capsys, "--what-if", "chat.ttft=300ms", "main+1", "--json")
    met = {each["name"]: each["rows"][-1]["attainment"] for each in json.loads("\n".join(out))}
    assert list(met) == ["ours", "with chat.ttft=300ms", "with main+1"]
    assert met["with chat.ttft=300ms"] < 0.7 < met["ours"] <= met["with main+1"]


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("mian+1", "no pool 'mian'; did you mean 'main'?"),
        ("chat.first=api", "no pool of route chat 'api'"),
        ("chat.ttft=soon", "soon"),
        ("more", "write POOL+N, ROUTE.ttft=TIME, ROUTE.first=POOL or ROUTE.repair=CLASS"),
    ],
)
def test_a_wrong_what_if_names_its_mistake(capsys: pytest.CaptureFixture[str], change: str, told: str) -> None:
    """Before the first replay."""
    code, out, err = replayed(capsys, "--what-if", change)
    assert (code, out) == (2, [])
    assert f"--what-if {change}: " in err
    assert "fitted" not in err  # which takes minutes, of a long log
    assert told in err


@pytest.mark.usefixtures("_files")
def test_the_report_is_one_html_file(capsys: pytest.CaptureFixture[str]) -> None:
    """With plots, and neither a script nor a reference to another file."""
    code, out, _ = replayed(capsys, "--html", "report.html", "--what-if", "main+1")
    page = Path("report.html").read_text()
    assert code == 0
    assert all(text in page for text in ("<svg", "as logged", "with main+1", out[-1]))
    assert not any(text in page for text in ("<script", "src=", "href="))


def test_names_of_a_trace_are_escaped(tmp_path: Path) -> None:
    """A route's name is whatever the log says."""
    write_html(tmp_path / "a.html", [], [LoggedAttainment("<b>", 10, 5)], ["<i>"], "<s>")
    page = (tmp_path / "a.html").read_text()
    assert all(text in page for text in ("&lt;b&gt;", "&lt;i&gt;", "&lt;s&gt;"))
