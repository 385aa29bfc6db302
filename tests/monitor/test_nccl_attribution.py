"""NCCL's own records in a run's verdicts: in the summary, and in what live views read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.recorded_runs import own_times, write_run

from ringside.monitor import Verdict
from ringside.monitor.nccl.attribution import attribute
from ringside.monitor.nccl.causes import LATE_RANK, NOT_KNOWN, SLOW_GPU, SLOW_LINK, Blame, PeerWaits, Seen
from ringside.monitor.nccl.report import MOST_BYTES, NcclReport, read_reports
from ringside.monitor.run.directory import RunReader
from ringside.monitor.summary import assess_run
from ringside.view.run.live import LiveRun

ID = "0x0000000000000009"


def told(
    *blames: Blame,
    late: dict[int, tuple[float, float]] | None = None,
    waits: list[PeerWaits] | None = None,
    seen_ratio: float = 1.0,
    calls: int = 100,
    in_communicator: bool = False,
) -> NcclReport:
    """Return a report on one communicator of four ranks; `late` are seconds of the host and the GPU by rank."""
    late = late or {}
    seen = Seen(
        id=ID, name="dp", ranks=4, ranks_seen=4, calls=calls, captured=0, seen_ratio=seen_ratio, seconds=100.0,
        late_seconds={rank: sum(parts) for rank, parts in late.items()},
        late_host_seconds={rank: host for rank, (host, _) in late.items()},
        late_gpu_seconds={rank: gpu for rank, (_, gpu) in late.items()},
        in_communicator=in_communicator, waits=waits or [],
    )  # fmt: skip
    return NcclReport(
        processes=4, interface=6, records=1000, dropped=0, torn=0, blames=list(blames), communicators=[seen]
    )


def slow(rank: int = 2, kind: str = "slow_rank") -> Verdict:
    return Verdict(kind=kind, ranks=[rank], since_step=60, detected_step=65, excess_ratio=0.3, cause="it was running")


def late(rank: int = 2, cause: str = SLOW_GPU, **changes: object) -> Blame:
    blame = Blame(cause=cause, rank=rank, seconds=20.0, host_seconds=1.0, gpu_seconds=19.0, communicator=ID)
    return msgspec.structs.replace(blame, **changes)


@pytest.mark.parametrize(
    ("parts", "cause", "words"),
    [
        ((9.0, 1.0), LATE_RANK, "its host calls collectives late: the others waited 10.0 s for it (host 9.00 s, GPU 1"),
        ((1.0, 9.0), SLOW_GPU, "its GPU comes to collectives late, not its host: the others waited 10.0 s for it"),
    ],
)
def test_a_verdict_gains_the_cause_with_the_seconds_of_each(parts: tuple[float, float], cause: str, words: str) -> None:
    (verdict,) = attribute([slow()], [told(late={2: parts, 1: (0.5, 0.5)})], 4, (0, 119))
    assert verdict.cause.startswith(f"it was running; by NCCL's own records {words}")
    assert (verdict.evidence["nccl_cause"], verdict.evidence["nccl_communicator"]) == (cause, ID)
    numbers = [verdict.evidence[f"nccl_{name}seconds"] for name in ("host_", "gpu_", "")]
    assert numbers == [*parts, sum(parts)]


def test_what_is_not_known_is_not_called_host_or_gpu() -> None:
    report = told(late={2: (5.0, 5.0)})
    seen = msgspec.structs.replace(report.communicators[0], late_host_seconds={}, late_gpu_seconds={})
    (verdict,) = attribute([slow()], [msgspec.structs.replace(report, communicators=[seen])], 4, (0, 119))
    assert verdict.evidence["nccl_cause"] == NOT_KNOWN
    assert "the others waited 10.0 s for it in collectives" in verdict.cause


@pytest.mark.parametrize(
    "report",
    [
        told(late={2: (9.0, 1.0)}, seen_ratio=0.49),
        told(late={2: (9.0, 1.0)}, calls=19),
        told(late={2: (9.0, 1.0), 1: (11.0, 0.0)}),
        told(late={2: (9.0, 1.0)}, in_communicator=True),
        told(),
    ],
)
def test_what_says_too_little_adds_no_cause(report: NcclReport) -> None:
    assert attribute([slow()], [report], 4, (0, 119)) == [slow()]
    other = slow(kind="hang")
    assert attribute([other], [told(late={2: (9.0, 1.0)})], 4, (0, 119)) == [other]


def test_whom_the_monitor_has_not_named_has_a_verdict_beside_the_others() -> None:
    report = told(late(), late(rank=1), late={2: (1.0, 19.0)})
    known, found = attribute([slow(rank=1, kind="input_bound")], [report], 4, (7, 119))
    assert known == slow(rank=1, kind="input_bound")
    assert (found.kind, found.ranks, found.since_step, found.detected_step) == ("slow_rank", [2], 7, 119)
    assert found.excess_ratio == pytest.approx(20 / 80)
    assert found.cost_rank_seconds == 80.0
    assert found.evidence["by"] == "NCCL's own records"
    assert "Compare this GPU" in found.advice


def test_ranks_of_a_communicator_and_ranks_that_there_are_not_get_no_verdict() -> None:
    report = told(late(in_communicator=True), late(rank=4), late(rank=-1), late(communicator="0x1"))
    assert attribute([], [report], 4, (0, 1)) == []


LINK = Blame(cause=SLOW_LINK, rank=1, peer=3, seconds=3.0, communicator=ID)
WAITS = PeerWaits(
    rank=1, peer=3, sends=True, steps=200, size_bytes=4_000_000_000, send_gpu_seconds=0.0, send_peer_seconds=0.0,
    send_seconds=30.0, recv_seconds=0.0, network_seconds=4.0,
)  # fmt: skip


def test_a_slow_link_has_its_rates_and_is_a_cause_where_the_monitor_knows_it() -> None:
    (found,) = attribute([], [told(LINK, waits=[WAITS])], 4, (0, 119))
    assert (found.kind, found.ranks, found.excess_ratio) == ("slow_link", [1, 3], 3.0)
    assert (found.evidence["bytes_per_second"], found.evidence["usual_bytes_per_second"]) == (1e9, 4e9)
    known = msgspec.structs.replace(found, cause="", evidence={})
    (again,) = attribute([known], [told(LINK, waits=[WAITS])], 4, (0, 119))
    assert again.evidence == {"nccl_cause": SLOW_LINK, "nccl_seconds": 3.0, "nccl_communicator": ID}
    older = msgspec.structs.replace(WAITS, send_seconds=4.0, network_seconds=0.0)
    assert attribute([], [told(LINK, waits=[older])], 4, (0, 119)) == [found]
    assert attribute([], [told(LINK)], 4, (0, 119)) == []  # without what its proxies waited for


def test_files_that_are_no_reports_are_left_out(tmp_path: Path) -> None:
    good = told(late())
    (tmp_path / "nccl.json").write_bytes(msgspec.json.encode(good))
    (tmp_path / "nccl-host.json").write_bytes(msgspec.json.encode(good)[:-9])
    (tmp_path / "nccl-list.json").write_text("[" * 100_000)
    (tmp_path / "nccl-folder.json").mkdir()
    with (tmp_path / "nccl-zeros.json").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    assert read_reports(tmp_path) == [good]


def test_a_run_has_it_while_it_goes_on_and_in_its_summary(tmp_path: Path) -> None:
    own = own_times(60, 4)
    path = write_run(tmp_path / "run", own)
    events = path / "events.jsonl"
    events.write_text("")
    live = LiveRun(path)
    assert live.poll()
    assert live.findings == []
    version = live.version
    (path / "nccl.json").write_bytes(msgspec.json.encode(told(late(), late={2: (1.0, 19.0)})))
    assert live.poll()
    assert not live.poll()
    assert live.version > version
    (finding,) = live.findings
    assert (finding.verdict.kind, finding.verdict.ranks, finding.over) == ("slow_rank", [2], False)
    assert finding.cost_rank_seconds == 80.0
    assert live.now()[2].verdicts == ("slow_rank",)
    summary, _ = assess_run(RunReader(path))
    (verdict,) = summary["verdicts"]
    assert verdict["evidence"]["nccl_cause"] == SLOW_GPU
    assert summary["assessment"]["state"] == "straggler"
    write_run(path, own)  # another run begins in this directory
    live.poll()
    assert live.findings == []


def test_the_detectors_own_verdict_is_kept_and_explained(tmp_path: Path) -> None:
    own = own_times(120, 4)
    own[60:, 2] *= 1.3
    path = write_run(tmp_path / "run", own)
    (path / "events.jsonl").write_text("")
    (path / "nccl.json").write_bytes(msgspec.json.encode(told(late(), late={2: (1.0, 19.0)})))
    (verdict,) = assess_run(RunReader(path))[0]["verdicts"]
    assert verdict["since_step"] == pytest.approx(60, abs=3)
    assert verdict["evidence"]["nccl_gpu_seconds"] == 19.0
    assert np.isfinite(verdict["cost_rank_seconds"])
