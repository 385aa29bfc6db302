"""A recorded run as the step that a what-if changes: what is taken of it, and what it must have."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.monitor.jobs import run_info

from ringside.doctor.kineto.straggler import LEAST_STEPS
from ringside.errors import UsageError
from ringside.monitor import StepRecord
from ringside.monitor.run.directory import RunWriter
from ringside.predict import preset
from ringside.view.run.recorded import Run
from ringside.view.run.training_step import host_sizes, recorded_step


def recorded(path: Path, ranks: int = 4, steps: int = LEAST_STEPS, hosts: str = "", **fields: float) -> Run:
    """A run in which rank r works 0.1 s and r hundredths, and of each step the last rank is exposed least."""
    info = run_info(ranks)
    writer = RunWriter(path, msgspec.structs.replace(info, hosts=list(hosts)) if hosts else info)
    for step in range(steps):
        writer.append(
            StepRecord(step=step, rank=rank, ended_unix=step + 1.0, step_seconds=0.2, own_seconds=0.1 + 0.01 * rank,
                       wait_seconds=0.01 * (ranks - 1 - rank), exposed_seconds=0.05 - 0.01 * rank,
                       **{"payload_bytes": 4_000_000, "collectives": 4, "busy_seconds": 0.02, **fields})
            for rank in range(ranks)
        )  # fmt: skip
    return Run(path)


def test_a_step_is_what_was_recorded(tmp_path: Path) -> None:
    step = recorded_step(recorded(tmp_path / "run"))
    assert (step.size_bytes, step.buckets, step.recorded) == (4e6, 4, True)
    assert step.own_s == pytest.approx(np.tile([0.1, 0.11, 0.12, 0.13], (LEAST_STEPS, 1)))
    assert step.exposed_s == pytest.approx([0.02] * LEAST_STEPS), "that of the rank that was blocked least"
    assert step.measured == ((1e6, 0.005),)


@pytest.mark.parametrize(
    ("fields", "measured"),
    [
        ({"latency_seconds": 0.001}, ((8.0, 0.001), (1e6, 0.005))),
        ({"latency_seconds": 0.005}, ((1e6, 0.005),)),  # no longer than a whole bucket
        ({"busy_seconds": 0.0, "wire_seconds": 0.04}, ((1e6, 0.01),)),
        ({"busy_seconds": 0.0}, ((1e6, 0.02),)),  # by what was left exposed
        ({"payload_bytes": 32}, ()),  # four buckets of eight bytes: nothing but latency
        ({"payload_bytes": 36}, ((9.0, 0.005),)),
        ({"collectives": 0}, ((4e6, 0.02),)),
    ],
)
def test_what_a_collective_took_is_known_where_it_was_recorded(
    tmp_path: Path, fields: dict[str, float], measured: tuple[tuple[float, float], ...]
) -> None:
    found = recorded_step(recorded(tmp_path / "run", **fields)).measured
    assert [size for size, _ in found] == [size for size, _ in measured]
    assert [took for _, took in found] == pytest.approx([took for _, took in measured])


def test_its_hosts_are_the_runs(tmp_path: Path) -> None:
    one = recorded(tmp_path / "one", hosts="aaaa")
    assert (host_sizes(one), recorded_step(one).topology.name) == ([4], "loopback")
    three = recorded(tmp_path / "three", hosts="aabc")
    assert host_sizes(three) == [2, 1, 1]
    assert recorded_step(three).topology.ranks_per_host == (2, 1, 1)
    given = preset("dgx-h100", 2, 2)
    assert recorded_step(three, given).topology is given


def test_what_cannot_be_changed_is_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    with pytest.raises(UsageError, match=r"has 4 ranks, and dgx-h100 16: give --hosts"):
        recorded_step(run, preset("dgx-h100", 2))
    for name, (ranks, steps) in {"alone": (1, LEAST_STEPS), "never": (2, 0)}.items():
        with pytest.raises(UsageError, match="no step of several ranks: there is nobody to wait for"):
            recorded_step(recorded(tmp_path / name, ranks, steps), preset("loopback", 1, ranks))
    with pytest.raises(UsageError, match=f"all ranks recorded {LEAST_STEPS - 1} steps, {LEAST_STEPS} are needed"):
        recorded_step(recorded(tmp_path / "short", steps=LEAST_STEPS - 1))
    with pytest.raises(UsageError, match="recorded no gradient bytes"):
        recorded_step(recorded(tmp_path / "nothing", payload_bytes=0))
