from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support import zygote
from tests.support.schemas import departures

from ringside.commands import build_parser
from ringside.commands.probe import table_lines, to_json, verdict_lines
from ringside.engine.cost.network import CostNetwork
from ringside.engine.probe.prober import Probe
from ringside.errors import UsageError
from ringside.lab import Lab

IN_A_LAB = pytest.mark.skipif(bool(Lab.unavailable()), reason=Lab.unavailable() or "a lab can be had")


def run(*argv: str) -> int:
    args = build_parser(verbs=("probe",)).parse_args(["probe", *argv])
    return int(args.command.run(args))


def command(*flags: str) -> list[str]:
    """Return that of a rank; only this verb: others may not be importable where their extras are missing."""
    return [zygote.python(), str(Path(__file__).parent / "scripts" / "one_verb.py"), "probe", *flags]


def outcome(n: int = 4, slow: dict[tuple[int, int], float] | None = None, **more):
    from ringside.pytorch.job_probe import ProbeOutcome

    per_byte = np.full((n, n), 1e-8)
    for pair, share in (slow or {}).items():
        per_byte[pair] /= share
    network = CostNetwork(np.full((n, n), 1e-4), per_byte, np.full(n, 5e-9), np.full(n, 5e-9))
    still = np.zeros((n, n))
    probe = Probe(network, network.rates, still)
    return ProbeOutcome(0, n, tuple(f"node-{v}" for v in range(n)), (1,) * n, **{"probe": probe, **more})


def test_fine_links_say_so_in_one_line():
    found = outcome()
    assert found.fine
    assert verdict_lines(found) == ["4 hosts, 12 links: all fine, 100 MB/s and 100 µs (medians)"]


def test_a_slow_link_is_named_with_a_better_ring():
    ring_s = {(0, 1, 2, 3): 0.2, (0, 2, 1, 3): 0.05}
    found = outcome(slow={(0, 1): 0.25, (1, 0): 0.25}, ring_s=ring_s)
    assert not found.fine
    lines = verdict_lines(found)
    assert lines[0] == "slow link: node-0 > node-1 carries 25 MB/s, others 100 MB/s"
    assert lines[2] == "better ring: 0,2,1,3; its slowest link carries 100 MB/s, not 25 MB/s"
    assert lines[3] == "  4 MiB around it took 50.0 ms, not 200 ms"
    assert max(map(len, [*lines, *table_lines(found)])) <= 80


def test_a_slow_host_is_named_once():
    links = {pair: 0.2 for v in range(5) for pair in ((5, v), (v, 5))}
    assert verdict_lines(outcome(6, links))[0] == "slow host: node-5 carries 20 MB/s, others 100 MB/s"


def test_a_broken_link_names_both_hosts_and_missing_ranks_are_listed():
    broken = outcome(probe=None, broken=((1, 3),))
    assert verdict_lines(broken) == ["broken link: node-1 and node-3 do not reach each other"]
    assert not broken.fine
    (words,) = verdict_lines(outcome(probe=None, missing=(2, 5)))
    assert words.startswith("ranks 2 and 5 did not reach rank 0 on ")
    assert "out of order" in verdict_lines(outcome(probe=None, trouble="out of order"))[0]


def test_many_hosts_show_the_slowest_links():
    found = outcome(12, slow={(3, 7): 0.1})
    lines = table_lines(found)
    assert max(map(len, lines)) <= 80
    assert any("3 > 7" in line and "10 MB/s" in line for line in lines)
    assert len(lines) < 40


def test_the_json_is_a_topology():
    found = outcome(slow={(0, 1): 0.25}, ring_s={(0, 1, 2, 3): 0.2})
    data = json.loads(json.dumps(to_json(found)))
    network = CostNetwork.from_topology(data)
    assert network.seconds_per_byte[0, 1] == pytest.approx(4e-8)
    assert data["hosts"][1]["name"] == "node-1"
    assert (data["ok"], data["better_order"] is not None, data["broken"]) == (False, True, [])
    assert data["slow"] == [{"src": 0, "dst": 1, "bytes_per_s": pytest.approx(25e6), "usual_bytes_per_s": 1e8}]
    assert departures("probe", data) == []
    broken = json.loads(json.dumps(to_json(outcome(probe=None, broken=((0, 1),)))))
    assert departures("probe", broken) == []
    assert (broken["links"], broken["broken"]) == ([], [[0, 1]])


def test_a_process_that_is_no_rank_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match=r"torchrun .* -m ringside probe.*-n 2") as error:
        run()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("argv", [("--order", "0,x"), ("-n", "1"), ("--timeout", "0")])
def test_what_cannot_be_is_refused(argv: tuple[str, ...]):
    with pytest.raises(UsageError):
        run(*argv)


def test_one_rank_has_no_links(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="at least 2"):
        run()


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run("--help")
    assert "$ ringside lab --hosts 4 --wiring mesh -- ringside probe" in capsys.readouterr().out


def test_local_ranks_are_started_and_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    path = tmp_path / "topology.json"
    monkeypatch.setattr(sys, "executable", zygote.python())  # what its ranks are started by
    status = run("-n", "2", "--quick", "--json", "-o", str(path))
    out, err = capfd.readouterr()
    data = json.loads(out)
    assert status == (0 if data["ok"] else 1), err
    assert data == json.loads(path.read_text())
    assert CostNetwork.from_topology(data).size == 2
    assert [host["ranks"] for host in data["hosts"]] == [1, 1]
    assert data["rings"][0]["order"] == [0, 1]


@IN_A_LAB
@pytest.mark.long
def test_a_slow_mesh_link_is_found_and_another_ring_is_timed():
    with Lab(hosts=4, ranks_per_host=2, rate="1gbit", wiring="mesh") as lab:
        lab.set_rate("250mbit", link=(1, 2))
        result = lab.run(command("--json", "--order", "0,3,2,1"), timeout_s=100)
    assert {rank.status for rank in result.ranks} == {1}
    data = json.loads(result.ranks[0].stdout)
    slowest = data["slow"][0]  # on a busy machine another may look slow beside it
    assert {slowest["src"], slowest["dst"]} == {1, 2}
    assert 20e6 < slowest["bytes_per_s"] < 50e6
    order = data["better_order"]
    steps = set(zip(order, [*order[1:], order[0]], strict=True))
    assert steps.isdisjoint({(1, 2), (2, 1)})
    times = {tuple(ring["order"]): ring["seconds"] for ring in data["rings"]}
    assert times[tuple(order)] < times[(0, 1, 2, 3)]
    assert (0, 3, 2, 1) in times
    assert [host["ranks"] for host in data["hosts"]] == [2] * 4


@IN_A_LAB
def test_a_link_that_is_down_is_named_by_both_hosts():
    with Lab(hosts=3, rate="1gbit", wiring="mesh") as lab:
        lab.cut(link=(1, 2))
        result = lab.run(command("--timeout", "6"), timeout_s=60)
    assert {rank.status for rank in result.ranks} == {1}
    assert not result.timed_out
    (line,) = result.ranks[0].stdout.splitlines()
    assert line.startswith("broken link: ")
    assert "#1 and " in line
    assert "#2 do not reach each other" in line


@IN_A_LAB
def test_a_host_that_rank_0_cannot_reach_is_said_on_both_ends():
    with Lab(hosts=3, rate="1gbit", wiring="mesh") as lab:
        lab.cut(link=(0, 2))
        result = lab.run(command("--timeout", "5"), timeout_s=60)
    assert not result.timed_out
    assert "rank 2 did not reach rank 0" in result.ranks[0].stdout
    assert "does not reach rank 0 at" in result.ranks[2].stderr
