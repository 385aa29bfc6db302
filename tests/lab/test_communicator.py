"""Real hosts: what runs between network namespaces that cannot share memory."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support import zygote

pytest.importorskip("torch")

from ringside.lab import Lab

from .factory import LabFactory

pytestmark = pytest.mark.native


def job(*words: str) -> list[str]:
    """Return the command of a rank that does one of the script's jobs."""
    return [zygote.python(), str(Path(__file__).parent / "scripts" / "communicators.py"), *words]


def run(lab: Lab, *words: str, env: dict[str, str] | None = None) -> list[Any]:
    """Run a job of the script on every rank of the lab and return what each told."""
    result = lab.run(job(*words), env, timeout_s=90, after_failure_s=20)
    result.check()
    return [
        json.loads(line.removeprefix("RESULT "))
        for rank in result.ranks
        for line in rank.stdout.splitlines()
        if line.startswith("RESULT ")
    ]


@pytest.mark.parametrize(
    "together",
    [pytest.param([[0, 1], [2]], marks=pytest.mark.core, id="two"), pytest.param([[0, 1], [2], [3, 4]], id="three")],
)
def test_ranks_are_grouped_by_the_hosts_they_are_on(lab_factory: LabFactory, together: list[list[int]]) -> None:
    lab = lab_factory(hosts=len(together), ranks_per_host=[len(ranks) for ranks in together])
    for hosts, shares, fine in run(lab, "grouped"):
        assert hosts == together
        assert fine
        del shares


def test_a_reducer_at_the_switch_adds_up(lab_factory: LabFactory) -> None:
    lab = lab_factory(hosts=3, ranks_per_host=2)
    env = {"MASTER_ADDR": lab.address(0), "MASTER_PORT": "29641"}
    reducer = lab.run_switch([sys.executable, "-m", "ringside.pytorch.in_network_reducer"], env)
    for found in run(lab, "at_the_switch", env=env):
        assert len(found) == 31
        assert all(found)
    assert reducer.wait(20) == 0
    before = lab.interface_bytes(0)
    assert before[0] > 0


@pytest.mark.parametrize(("hosts", "code"), [(2, "int8"), (4, "int8"), (2, "fp8_e4m3")])
def test_by_a_light_wire_all_ranks_end_with_the_same_bits(lab_factory: LabFactory, hosts: int, code: str) -> None:
    """Sums and a trained model; and a host's link carries 0.27 times the bytes at most, headers and scales included."""
    found = run(lab_factory(hosts=hosts, ranks_per_host=2), "by_a_light_wire", code)
    assert len(found) == 2 * hosts
    for sums, share in found:
        assert sums == found[0][0], "ranks hold different bits"
        assert share <= 0.27


def test_a_long_link_has_as_many_connections_as_the_hosts_buffers_ask_for(lab_factory: LabFactory) -> None:
    """Buffers are smaller at both ends, and on one host more so: that one decides for both."""
    lab = lab_factory(hosts=2, rate="100mbit", delay_s=0.02)
    for host, most in enumerate(("200000", "150000")):
        lab.inside(host, functools.partial(Path("/proc/sys/net/ipv4/tcp_wmem").write_text, f"4096 16384 {most}"))
    found = run(lab, "over_a_long_link", env={"RINGSIDE_SELECTION": "fresh"})
    assert found[0] == found[1]
    connections, fine = found[0]
    assert 2 <= connections <= 8
    assert fine


@pytest.mark.long
def test_a_reducer_takes_less_of_each_link_than_a_ring(lab_factory: LabFactory) -> None:
    lab = lab_factory(hosts=4, ranks_per_host=1)
    sent = {}
    for port, name in enumerate(("in_network", "ring")):
        env = {"MASTER_ADDR": lab.address(0), "MASTER_PORT": str(29642 + port)}
        reducer = lab.run_switch([sys.executable, "-m", "ringside.pytorch.in_network_reducer"], env)
        before = lab.interface_bytes(1)[1]
        assert run(lab, "once", name, env=env) == [4.0] * 4
        reducer.wait(20)
        sent[name] = lab.interface_bytes(1)[1] - before
    # One tensor against 2 (4 - 1) / 4 of it, and both with some talk at start-up.
    assert 1.3 < sent["ring"] / sent["in_network"] < 1.6


def test_buckets_travel_between_hosts_while_backward_computes(lab_factory: LabFactory, tmp_path: Path) -> None:
    lab = lab_factory(hosts=2, ranks_per_host=2)
    sums = {}
    for engine in ("auto", "native"):
        env = {"RINGSIDE_ENGINE": engine, "OUT": str(tmp_path / engine)}
        found = run(lab, "buckets", env=env)
        assert len(found) == 4
        assert len({total for _, total, _ in found}) == 1, "all ranks end with the same parameters"
        sums[engine] = found[0][1]
        for counters, _, times in found:
            assert all(name.startswith("ringside/") for name in counters) == (engine == "auto"), counters
            assert times
            if engine == "auto":
                # Total communication is more than what is exposed: the first buckets are under way during backward.
                assert sum(sync for _, sync in times) > sum(exposed for exposed, _ in times)
    assert sums["auto"] == pytest.approx(sums["native"], rel=1e-5)


def test_a_host_that_vanishes_is_named_by_every_survivor(lab_factory: LabFactory, tmp_path: Path) -> None:
    lab = lab_factory(hosts=3, ranks_per_host=[2, 2, 1])
    ready = tmp_path / "ready"
    ready.mkdir()
    cutter = _cut_when_ready(lab, ready, ranks=5, host=2)
    result = lab.run(job("until_a_host_vanishes"), {"READY": str(ready)}, timeout_s=60)
    cutter.join(10)
    told = {
        number: json.loads(line.removeprefix("RESULT "))
        for number, rank in enumerate(result.ranks)
        for line in rank.stdout.splitlines()
        if line.startswith("RESULT ")
    }
    for survivor in range(4):
        message, ranks, seconds = told[survivor]
        assert ranks == [4], told
        assert "rank 4 on host" in message
        assert seconds < 15  # 4 s by the kernel's word, and room for a busy machine


def _cut_when_ready(lab: Lab, ready: Path, *, ranks: int, host: int) -> Any:
    import threading
    import time

    def cut() -> None:
        deadline = time.monotonic() + 50
        while len(list(ready.iterdir())) < ranks and time.monotonic() < deadline:
            time.sleep(0.05)  # other processes' files: there is nothing to wait on
        lab.cut(host=host)

    thread = threading.Thread(target=cut)
    thread.start()
    return thread
