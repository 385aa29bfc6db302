"""`/metrics`: what it says, how it is bounded, and who may read it."""

from __future__ import annotations

import contextlib
import http.client
import math
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from tests.monitor.jobs import records_of, run_info
from tests.recorded_runs import own_times

pytest.importorskip("prometheus_client")
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from ringside.errors import UsageError
from ringside.monitor.alerts.counters import MetricCounters, MetricsSnapshot
from ringside.monitor.alerts.live import AlertService, AlertSettings, Endpoint
from ringside.monitor.collector import StepCollector
from ringside.view.export.prometheus import PLACES, RANKS_SHOWN, WORST_SHOWN, MetricsServer, render

LIMIT_S = 30.0
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def serve(endpoint: Endpoint, snapshot: Callable[[], MetricsSnapshot]) -> MetricsServer:
    """Serve a run's metrics as rank 0 does."""
    return MetricsServer(endpoint, lambda accept: render(snapshot(), accept))


class Job:
    """A collector and an alarm that serves metrics, fed with own times."""

    def __init__(self, ranks: int, tmp_path: Path, name: str = "test") -> None:
        info = run_info(ranks, name)
        self.alarm = AlertService(info, tmp_path, AlertSettings(endpoint=Endpoint("127.0.0.1", 0)), serve=serve)
        self.collector = StepCollector(ranks, listeners=[self.alarm.record])

    def feed(self, own: np.ndarray, batch: int = 7) -> None:
        records = records_of(own, payload_bytes=1000, overhead_seconds=0.001)
        for begin in range(0, len(records), batch):
            some = records[begin : begin + batch]
            self.collector.add(some)
            self.alarm.tick(some, self.collector)


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(ranks: int, **how: str) -> Job:
        jobs.append(Job(ranks, tmp_path, **how))
        return jobs[-1]

    yield make
    for job in jobs:
        job.alarm.close()


def samples(figures: MetricsSnapshot) -> Samples:
    page, _ = render(figures)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def get(url: str, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=LIMIT_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


# ------------------------------------------------------------------------------------------------ the figures


def test_figures_add_up(make_job: Callable[..., Job]) -> None:
    own = own_times(90, 4)
    own[40:, 2] *= 1.4
    job = make_job(4)
    job.feed(own)
    found = samples(job.alarm.snapshot())
    slowest = own.max(axis=1)
    assert found["ringside_steps_total", ()] == 90
    assert found["ringside_ranks", ()] == 4
    assert found["ringside_payload_bytes_total", ()] == 4 * 90 * 1000
    assert found["ringside_overhead_seconds_total", ()] == pytest.approx(4 * 90 * 0.001)
    assert found["ringside_rank_step_seconds_total", ()] == pytest.approx(4 * (slowest + 0.004).sum())
    for rank in range(4):
        label = (("rank", str(rank)),)
        assert found["ringside_rank_own_seconds_total", label] == pytest.approx(own[:, rank].sum())
        assert found["ringside_rank_wait_seconds_total", label] == pytest.approx((slowest - own[:, rank]).sum())
        exposed = slowest - own[:, rank] + 0.004
        assert found["ringside_rank_exposed_seconds_total", label] == pytest.approx(exposed.sum())
    assert found["ringside_step_seconds_count", ()] == 90
    assert found["ringside_step_seconds_sum", ()] == pytest.approx((slowest + 0.004).sum())
    below = float((slowest + 0.004 <= 0.1).sum())
    assert found["ringside_step_seconds_bucket", (("le", "0.1"),)] == below
    assert found["ringside_recent_own_seconds", (("of", "max"),)] == pytest.approx(own[-32:, 2].mean())
    assert found["ringside_records_total", ()] == 360
    assert found["ringside_collector_lag_steps", ()] == 0
    assert found["ringside_verdict_active", (("kind", "slow_rank"), ("rank", "2"))] == 1
    assert found["ringside_verdict_excess_ratio", (("kind", "slow_rank"), ("rank", "2"))] == pytest.approx(0.4, abs=0.1)
    (verdict,) = job.collector.verdicts
    assert found["ringside_cost_rank_seconds_total", ()] == pytest.approx(verdict.cost_rank_seconds)


def test_a_verdict_is_active_only_while_it_holds_and_its_price_stays(make_job: Callable[..., Job]) -> None:
    own = own_times(200, 4)
    own[60:120, 2] *= 1.4
    job, active, cost = make_job(4), [], [0.0]
    for begin in range(0, 200, 10):
        records = [r for r in records_of(own) if begin <= r.step < begin + 10]
        job.collector.add(records)
        job.alarm.tick(records, job.collector)
        found = samples(job.alarm.snapshot())
        active.append(("ringside_verdict_active", (("kind", "slow_rank"), ("rank", "2"))) in found)
        cost.append(found["ringside_cost_rank_seconds_total", ()])
    assert active[5] is False
    assert any(active[6:13])
    assert active[-1] is False
    assert cost == sorted(cost)
    (verdict,) = job.collector.verdicts
    assert cost[-1] == pytest.approx(verdict.cost_rank_seconds)
    assert cost[-1] == pytest.approx(4 * 60 * 0.04, rel=0.3)
    assert found["ringside_verdicts_total", (("kind", "slow_rank"),)] == 1


def test_records_that_no_analysis_saw_are_counted(make_job: Callable[..., Job]) -> None:
    job = make_job(2)
    job.feed(own_times(30, 2))
    records = records_of(own_times(60, 3))
    strange = [r for r in records if r.rank == 2 or r.step < 5]  # 60 of no rank, and late ones of ranks 0 and 1
    job.collector.add(strange)
    job.alarm.tick(strange, job.collector)
    alone = [r for r in records if r.rank == 0 and r.step >= 30]
    job.collector.add(alone)
    job.alarm.tick(alone, job.collector)
    found = samples(job.alarm.snapshot())
    dropped = {reason: found["ringside_records_dropped_total", (("reason", reason),)] for reason in ("late", "invalid")}
    assert dropped == {"late": 10, "invalid": 60}
    assert found["ringside_records_dropped_total", (("reason", "missing"),)] == job.collector.steps - 30 > 0
    assert found["ringside_collector_lag_steps", ()] == 60 - job.collector.steps


def test_many_ranks_have_few_series(make_job: Callable[..., Job]) -> None:
    sizes = {}
    for ranks in (RANKS_SHOWN, RANKS_SHOWN + 1, 4 * RANKS_SHOWN):
        own = own_times(12, ranks)
        own[:, ranks - 3] *= 2
        job = make_job(ranks)
        job.feed(own, batch=ranks)
        found = samples(job.alarm.snapshot())
        shown = [dict(labels)["rank"] for name, labels in found if name == "ringside_rank_own_seconds_total"]
        sizes[ranks] = len(shown)
        assert str(ranks - 3) in shown
        assert len(found) < 3 * RANKS_SHOWN + 200
        assert not [labels for name, labels in found if "step" in dict(labels)]
    assert sizes == {RANKS_SHOWN: RANKS_SHOWN, RANKS_SHOWN + 1: WORST_SHOWN, 4 * RANKS_SHOWN: WORST_SHOWN}


def test_before_the_first_step_nothing_is_made_up() -> None:
    found = samples(MetricCounters(run_info(3)).snapshot([], {}, {}))
    assert found["ringside_steps_total", ()] == 0
    assert "ringside_last_step_timestamp_seconds" not in {name for name, _ in found}
    assert all(math.isfinite(value) for value in found.values())


HOSTILE = 'evil"} 1\nringside_steps_total 9\n\\' + "x" * 500 + "\udcff"


def test_hostile_text_stays_inside_its_label() -> None:
    info = msgspec.structs.replace(run_info(2), name=HOSTILE, engine="\udcff\n")
    found = samples(MetricCounters(info).snapshot([], {}, {}))
    ((_, labels),) = [key for key in found if key[0] == "ringside_run_info"]
    assert dict(labels)["run"] == HOSTILE[:128]
    assert dict(labels)["engine"] == "\\udcff\n"
    assert found["ringside_steps_total", ()] == 0


def test_prometheus_own_linter_has_nothing_to_say(make_job: Callable[..., Job]) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here (Debian package prometheus)")
    own = own_times(90, 3)
    own[40:, 2] *= 1.4
    job = make_job(3)
    job.feed(own)
    page, _ = render(job.alarm.snapshot())
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


# ------------------------------------------------------------------------------------------------ the server


def test_the_page_is_served_in_both_formats(make_job: Callable[..., Job]) -> None:
    job = make_job(2)
    job.feed(own_times(10, 2))
    status, kind, page = get(job.alarm.url)
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert "ringside_steps_total 10.0" in page
    status, kind, page = get(job.alarm.url, Accept="application/openmetrics-text; version=1.0.0")
    assert (status, kind.split(";")[0]) == (200, "application/openmetrics-text")
    assert page.endswith("# EOF\n")
    assert get(job.alarm.url, "/")[0] == 404
    url = job.alarm.url
    job.alarm.close()
    with pytest.raises(ConnectionError):
        get(url)


def test_a_token_is_asked_for() -> None:
    server = MetricsServer(Endpoint("127.0.0.1", 0, "sesame-ü"), lambda accept: (b"page\n", "text/plain"))
    try:
        assert get(server.url)[0] == 401
        assert get(server.url, Authorization="Bearer wrong")[0] == 401
        right = "Bearer sesame-ü".encode().decode("latin-1")
        assert get(server.url, Authorization=right) == (200, "text/plain", "page\n")
    finally:
        server.close()


def test_a_page_that_cannot_be_made_is_an_error_for_its_reader_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fail(accept: str) -> tuple[bytes, str]:
        raise RuntimeError("odd")

    server = MetricsServer(Endpoint("127.0.0.1", 0), fail)
    try:
        assert get(server.url)[0] == get(server.url)[0] == 500
    finally:
        server.close()
    assert "training goes on" in caplog.text


def test_readers_that_say_nothing_make_place_for_others() -> None:
    server = MetricsServer(Endpoint("127.0.0.1", 0), lambda accept: (b"page\n", "text/plain"))
    parts = urlsplit(server.url)
    silent = [socket.create_connection((parts.hostname, parts.port), LIMIT_S) for _ in range(PLACES + 1)]
    try:
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""  # hung up on
    finally:
        for connection in silent:
            connection.close()
        server.close()


def test_a_port_that_is_taken_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = Endpoint("127.0.0.1", taken.getsockname()[1])
        alarm = AlertService(run_info(2), tmp_path, AlertSettings(endpoint=endpoint), serve=serve)
        alarm.close()
    assert alarm.url == ""
    (line,) = [record.getMessage() for record in caplog.records]
    assert "another --metrics-port" in line
    assert "training goes on" in line


@pytest.mark.parametrize(
    ("text", "token", "endpoint"),
    [
        ("9464", "", ("127.0.0.1", 9464, "")),
        ("0", "t", ("127.0.0.1", 0, "t")),
        ("127.0.0.5:80", "", ("127.0.0.5", 80, "")),
        ("[::1]:80", "", ("::1", 80, "")),
        ("0.0.0.0:80", "t", ("0.0.0.0", 80, "t")),
    ],
)
def test_endpoints(text: str, token: str, endpoint: tuple[str, int, str]) -> None:
    assert Endpoint.parse(text, token) == endpoint


@pytest.mark.parametrize("text", ["0.0.0.0:80", "[::]:80", "10.0.0.5:80", "x", "1.2.3:4", "70000", "-1", "host:80", ""])
def test_endpoints_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match=r"--metrics-port|RINGSIDE_METRICS_TOKEN"):
        Endpoint.parse(text)


def test_what_the_environment_asks_for_in_vain_is_said_and_the_rest_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RINGSIDE_ON_VERDICT", "say 'hello")
    monkeypatch.setenv("RINGSIDE_METRICS_PORT", "0")
    monkeypatch.delenv("RINGSIDE_METRICS_TOKEN", raising=False)
    alarm = AlertService(run_info(2), tmp_path, serve=serve)
    try:
        assert get(alarm.url)[0] == 200
    finally:
        alarm.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("RINGSIDE_ON_VERDICT is not followed")
