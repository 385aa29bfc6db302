"""Logs of single collectives: who came last is named, whoever recorded it; nobody where the records do not carry it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.mangle import mangled

from ringside.doctor import examine
from ringside.doctor.calls import clog, inspector
from ringside.doctor.calls import judge as judge_module
from ringside.doctor.calls.judge import judge
from ringside.doctor.calls.record import BLOCK_BYTES, Calls
from ringside.doctor.findings import is_enough_to_judge

from .call_logs import START_S, WRITERS, CallJob, write_clog, write_comma, write_inspector

SAMPLES = Path(__file__).parent / "nccl_samples"


@pytest.fixture(params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path: Path):
    """Write a job's logs in one of the forms, and examine them."""

    def examined(job: CallJob):
        WRITERS[request.param](job, tmp_path)
        return examine([tmp_path])

    return examined


def test_the_rank_that_comes_last_is_named_and_no_victim(written) -> None:
    found = written(CallJob(late={2: 0.004}))
    (verdict,) = found.verdicts
    assert (verdict.kind, verdict.ranks) == ("slow_rank", [2])
    assert verdict.evidence["last_in"] == verdict.evidence["calls"] == 60
    assert verdict.excess_ratio == pytest.approx(0.004 / 0.0115, rel=0.25)
    assert verdict.cost_rank_seconds == pytest.approx(4 * 60 * 0.004, rel=0.2)
    assert is_enough_to_judge(found)
    assert all(note.used for note in found.notes)


def test_nobody_is_named_where_nobody_is_late(written) -> None:
    found = written(CallJob())
    assert found.verdicts == []
    assert is_enough_to_judge(found)


def test_what_was_seen_is_counted_and_too_few_calls_blame_nobody(tmp_path: Path) -> None:
    write_inspector(CallJob(late={2: 0.004}, lose=0.52, calls=400), tmp_path)
    found = examine([tmp_path])
    assert found.verdicts == []
    (line,) = found.unjudged
    assert line.why.startswith("seen 4")
    assert "% of its calls" in line.why
    (sheet,) = found.sheets
    assert 0.4 < sheet.rows[0][4] < 0.5


def test_a_few_lost_calls_blame_as_before(written) -> None:
    (verdict,) = written(CallJob(late={1: 0.004}, lose=0.1, calls=200)).verdicts
    assert verdict.ranks == [1]


def test_a_rank_of_which_there_is_no_log(tmp_path: Path) -> None:
    write_inspector(CallJob(late={2: 0.004}), tmp_path)
    (tmp_path / "node3-pid1003.log").unlink()
    found = examine([tmp_path])
    assert found.verdicts == []
    assert "of its 4 ranks only 0-2 are here" in found.unjudged[0].why


def test_lines_written_at_one_moment_without_starts_have_no_share_of_the_time(tmp_path: Path) -> None:
    write_inspector(CallJob(late={2: 0.004}), tmp_path)
    for path in tmp_path.iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["metadata"]["dump_timestamp_us"] = 5
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = examine([tmp_path])
    assert found.verdicts == []
    assert "no share of time is known" in found.unjudged[0].why


@pytest.mark.parametrize("off_s", [0.0, 0.05, -3.0])
def test_clocks_that_are_apart_change_nothing(tmp_path: Path, off_s: float) -> None:
    job = CallJob(late={1: 0.005}, clocks={2: off_s, 3: off_s}, hosts={0: "a", 1: "a", 2: "b", 3: "b"})
    write_inspector(job, tmp_path, verbose=True)
    (verdict,) = examine([tmp_path]).verdicts
    assert verdict.ranks == [1]
    assert verdict.evidence["by"] == "the shortest execution time"


def test_starts_are_compared_on_one_host(tmp_path: Path) -> None:
    """They find what the spread of the ends could explain."""
    job = CallJob(late={1: 0.0012}, hosts=dict.fromkeys(range(4), "a"), wire_s=0.003, noise=0.001)
    write_inspector(job, tmp_path, verbose=True)
    (verdict,) = examine([tmp_path]).verdicts
    assert (verdict.ranks, verdict.evidence["by"]) == ([1], "start times")


def test_hosts_of_one_name_have_two_clocks(tmp_path: Path) -> None:
    """Nobody is late: rank 1's clock is ahead."""
    write_inspector(CallJob(ranks=2, clocks={1: 0.010}, hosts={0: "localhost", 1: "localhost"}), tmp_path, verbose=True)
    assert examine([tmp_path]).verdicts == []


def test_who_leaves_first_is_not_who_came_last(tmp_path: Path) -> None:
    """Communication takes most of the time, and rank 3 always leaves it a third earlier."""
    job = CallJob(own_s=0.001, wire_s=0.009, noise=0.001)
    job.ends[:, 3] -= 0.003
    write_inspector(job, tmp_path)
    assert examine([tmp_path]).verdicts == []


def test_a_rank_that_another_one_holds_up_elsewhere_is_a_victim(tmp_path: Path) -> None:
    """Process 1 waits for process 0 in their pair, so that process 2 waits for it in theirs."""
    job = CallJob(ranks=2, late={0: 0.004})
    for pid, member_of in enumerate(({"0xa": 0}, {"0xa": 1, "0xb": 0}, {"0xb": 1})):
        lines = [
            {
                "header": {"id": communicator, "rank": rank, "n_ranks": 2},
                "metadata": {"dump_timestamp_us": int(end * 1e6), "hostname": "a", "pid": pid},
                "coll_perf": {"coll": "AllReduce", "coll_sn": number, "coll_exec_time_us": int((end - start) * 1e6)},
            }
            for communicator, rank in member_of.items()
            for number, start, end in job.records(rank)
        ]
        (tmp_path / f"{pid}.log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (verdict,) = examine([tmp_path]).verdicts
    assert (verdict.ranks, verdict.evidence["communicator"]) == ([0], "0xa")


def test_a_link_that_is_slow_is_named_by_its_wire(tmp_path: Path) -> None:
    write_inspector(CallJob(), tmp_path, version="v4.4")
    for rank in range(4):
        path = tmp_path / f"node{rank}-pid{1000 + rank}.log"
        step = {"trans_size_bytes": 1 << 20, "gpu_produce_us": 50, "peer_credit_us": 5}
        step["wire_us"] = 2000 if rank == 1 else 200
        trace = {"record_type": "proxy_op", "peer": (rank + 1) % 4, "direction": "send", "is_final": True}
        line = json.dumps({"proxy_trace": {**trace, "steps": [step]}}) + "\n"
        path.write_text(path.read_text() + line * 60)
    (verdict,) = examine([tmp_path]).verdicts
    assert (verdict.kind, verdict.ranks) == ("slow_link", [1, 2])
    assert verdict.evidence["wire_seconds"] == pytest.approx(0.12)


@pytest.mark.parametrize(("verbose", "lose"), [(True, 0.1), (False, 0.1), (False, 0.0)])
def test_calls_are_compared_some_at_a_time_as_all_at_once(
    verbose: bool, lose: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some may be lost, and lines are in no order; then the rank is late in the first half alone."""
    job = CallJob(late={1: 0.004}, lose=lose, calls=200, hosts=dict.fromkeys(range(4), "a"))
    found = []
    for late_throughout in (True, False):
        if not late_throughout:
            job.starts[100:] = job.starts[100:, :1]
        write_inspector(job, tmp_path, verbose=verbose)
        path = tmp_path / "a-pid1002.log"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines[50:], *lines[:50]]))
        for some in (judge_module.BLOCK_ITEMS, 28):
            with monkeypatch.context() as patched:
                patched.setattr(judge_module, "BLOCK_ITEMS", some)
                found.append(examine([tmp_path]).verdicts)
    (at_once,), (verdict,), *of_a_warm_up = found
    assert of_a_warm_up == [[], []]
    assert (verdict.ranks, verdict.evidence["by"]) == ([1], "start times" if verbose else "the shortest execution time")
    for name in ("calls", "last_in", "lost_seconds", "recorded_seconds"):
        assert verdict.evidence[name] == pytest.approx(at_once.evidence[name])


def test_of_thousands_of_late_ranks_the_costliest_are_named_in_no_time() -> None:
    """Each pair with each other one, that took 7.5 s of CPU."""
    calls = Calls()
    for pair in range(2400):
        for rank in range(2):
            calls.join(f"0x{pair}", rank, 2, (f"host{pair}", str(rank)))
            stream = calls.stream(f"0x{pair}", "AllReduce", rank)
            for number in range(20):
                stream.add(number, math.nan, 0.1 if rank else 0.9 + pair / 1e6)
    calls.written_s = (0.0, 20.0)
    begin = time.process_time()
    found = judge("log", calls, [])
    assert time.process_time() - begin < 4.0
    assert len(found.verdicts) == 64
    assert found.verdicts[0].evidence["communicator"] == "0x2399"
    assert found.unjudged[0].why == "of 2,400 ranks that come last in their communicators, the 64 costliest are named"


# ------------------------------------------------------------------------------------------------ published samples


@pytest.mark.parametrize("name", ["inspector_v4_0.json", "inspector_v4_0_verbose.json"])
def test_published_lines_of_the_inspector(tmp_path: Path, name: str) -> None:
    (tmp_path / "host-pid1.log").write_text(json.dumps(json.loads((SAMPLES / name).read_text())) + "\n")
    found = examine([tmp_path])
    (note,) = found.notes
    assert (note.kind, note.text, note.used) == ("NCCL Inspector log", "v4.0: 1 collective", True)
    (line,) = found.unjudged
    assert "of its 8 ranks only" in line.why


def test_a_published_line_whose_time_is_no_integer() -> None:
    (note,) = examine([SAMPLES / "inspector_v4_0_float.json"]).notes
    assert (note.text, note.used) == ("v4.0: 1 collective", True)


def test_published_lines_with_markers_and_proxy_traces() -> None:
    found = examine([SAMPLES / "inspector_v4_4.jsonl"])
    assert found.notes[0].text == "v4.4: 1 collective, 4 proxy traces"
    calls, links = found.sheets
    assert calls.rows == [["0x7f8c496ae9f661", 8, "AllReduce", 1, 1.0, 1.0, 2, 4096]]
    assert links.rows == [["0x7f8c496ae9f661", 2, 3, 1048576, 1e-05, 1e-05, 1e-05]]


def test_the_published_event_of_comma(tmp_path: Path) -> None:
    (tmp_path / "latency.json").write_text("[" + (SAMPLES / "comma_event.json").read_text() + "]")
    found = examine([tmp_path])
    assert [(note.kind, note.text, note.used) for note in found.notes] == [("CoMMA trace", "1 collective", True)]


def test_the_published_log_of_clog() -> None:
    found = examine([SAMPLES / "clog_v1.log"])
    (note,) = found.notes
    assert (note.kind, note.used) == ("ClogHook log", True)
    assert note.text == "3 collectives of 1 communicator, 4 replayed ones left out"


# ------------------------------------------------------------------------------------------------ hostile input


@pytest.mark.parametrize(
    "line",
    [
        '{"header":{"id":"x","rank":-1,"n_ranks":2},"coll_perf":{}}',
        '{"header":{"id":"x","rank":1e9},"metadata":{}}',
        '{"header":{"id":"x","rank":0,"n_ranks":2},"coll_perf":{"coll":"A","coll_sn":1e400,"coll_exec_time_us":1}}',
        '{"header":{"id":"x","rank":0,"n_ranks":2},"coll_perf":{"coll":"A","coll_sn":9999999999999999999999}}',
        "[" * 100_000,
        "x" * 10_000,
    ],
)
def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, line: str) -> None:
    write_inspector(CallJob(late={2: 0.004}), tmp_path)
    path = tmp_path / "node1-pid1001.log"
    path.write_text(path.read_text() + line + "\n")
    found = examine([tmp_path])
    assert [verdict.ranks for verdict in found.verdicts] == [[2]]
    assert any("1 damaged line left out" in note.text for note in found.notes)


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("seed", range(8))
def test_mangled_logs_never_fail_and_blame_nobody_else(tmp_path: Path, form: str, seed: int) -> None:
    WRITERS[form](CallJob(late={2: 0.004}), tmp_path)
    path = sorted(tmp_path.iterdir())[seed % 4]
    path.write_text(mangled(path.read_text(), np.random.default_rng(seed)))
    found = examine([tmp_path])
    assert {rank for verdict in found.verdicts for rank in verdict.ranks} <= {2}
    assert not any("could not be read" in note.text for note in found.notes)
    assert all(math.isfinite(verdict.excess_ratio) for verdict in found.verdicts)


def test_a_line_longer_than_what_is_read_at_once_is_whole(tmp_path: Path) -> None:
    write_inspector(CallJob(), tmp_path, version="v4.4")
    path = tmp_path / "node0-pid1000.log"
    steps = [{"trans_size_bytes": 3, "gpu_produce_us": 0, "peer_credit_us": 0, "wire_us": 1}] * 10_000
    trace = {"record_type": "proxy_op", "peer": 1, "direction": "send", "steps": steps}
    line = json.dumps({"proxy_trace": trace}) + "\n"
    assert len(line) > 2 * BLOCK_BYTES
    path.write_text(path.read_text() + line + path.read_text())
    found = examine([tmp_path])
    assert found.notes[0].text == "v4.4: 120 collectives, 1 proxy trace"
    assert found.sheets[1].rows[0][3] == 30_000


def test_ranks_and_numbers_as_large_as_any_cost_nothing(tmp_path: Path) -> None:
    head = {"id": "x", "rank": 0, "n_ranks": (1 << 20) - 1}
    perf = {"coll": "AllReduce", "coll_sn": (1 << 62) - 1, "coll_exec_time_us": (1 << 62) - 1}
    lines = [{"header": head, "metadata": {}, "coll_perf": {**perf, "coll_sn": seq}} for seq in (0, (1 << 62) - 1)]
    (tmp_path / "a.log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = examine([tmp_path])
    assert found.verdicts == []
    assert found.notes[0].kind == inspector.KIND


def test_an_end_without_a_start_is_no_call(tmp_path: Path) -> None:
    write_clog(CallJob(ranks=2), tmp_path)
    path = tmp_path / "clog_rank0.log"
    path.write_text(path.read_text() + f"C1|E|+9\nC7|S|+1\nnew_comm\n\nC1|sig\nV|1|base_timestamp={START_S}x\n")
    assert "60 collectives" in examine([tmp_path]).notes[0].text


def test_a_log_of_clog_with_other_line_ends_or_too_many_signatures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_clog(CallJob(late={1: 0.004}), tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert [verdict.ranks for verdict in examine([tmp_path]).verdicts] == [[1]]
    monkeypatch.setattr(clog, "MOST_SIGNATURES", 1)
    path = tmp_path / "clog_rank0.log"
    path.write_text(path.read_text() + "C2|sig|all_gather|comm=world\nC2|S|+1.0\nC2|E|+2.0\n")
    assert "60 collectives" in examine([tmp_path]).notes[0].text


def test_calls_of_which_none_ended_cost_no_other_log(tmp_path: Path) -> None:
    """A kind of call that hangs everywhere; then rank 2's log holds nothing but signatures."""
    write_clog(CallJob(late={1: 0.004}), tmp_path)
    for rank in range(4):
        path = tmp_path / f"clog_rank{rank}.log"
        path.write_text(path.read_text() + "C2|sig|all_gather|comm=world\nC2|S|+900000.0\n")
    assert [verdict.ranks for verdict in examine([tmp_path]).verdicts] == [[1]]
    path = tmp_path / "clog_rank2.log"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "|+" not in line))
    found = examine([tmp_path])
    assert found.verdicts == []
    assert found.notes[2].text == "0 collectives of 1 communicator; no call began or ended: LIFECYCLE is off"
    assert "of its 4 ranks only 0, 1, 3 are here" in found.unjudged[0].why
    for rank in (0, 1, 3):
        (tmp_path / f"clog_rank{rank}.log").unlink()
    assert examine([tmp_path]).unjudged[0].why == "no collective that ended is recorded"


def test_how_many_ranks_there_are_is_not_known_of_comma(tmp_path: Path) -> None:
    write_comma(CallJob(late={1: 0.004}), tmp_path)
    (tmp_path / "comma_3.json").unlink()
    found = examine([tmp_path])
    assert [verdict.ranks for verdict in found.verdicts] == [[1]]
    (line,) = found.unjudged
    assert line.what == "how many ranks the communicators have"
    assert "above the highest one given may be missing" in line.why
