"""Keys of everything that programs read: `--json` of every command, and the files of a run directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.bench.reports import PLAN, report
from tests.golden.calls import Call
from tests.support.golden import Golden, keys_of
from tests.support.schemas import departures

from ringside.bench import launch
from ringside.commands import bench, lab, probe
from ringside.engine.cost.network import CostNetwork
from ringside.engine.probe.prober import Probe
from ringside.lab.processes import RankPlacement, RankResult, RunResult, place_ranks
from ringside.monitor.run.records import RunInfo, StepRecord
from ringside.monitor.verdict import Verdict
from ringside.pytorch.job_probe import ProbeOutcome

H100 = "--preset dgx-h100 --hosts 4"
COMMANDS = {
    "report-demo": "report demo --json",
    "report-hosts": "report hosts --json",
    "top": "top --json hosts",
    "compare": "compare demo hosts --json --fail-over 5%",
    "doctor-runs": "doctor demo hosts --json",
    "doctor-dumps": "doctor data/flight_recorder --json",
    "doctor-traces": "doctor data/kineto/dlrm_8rank.tar.gz --json",
    "doctor-timeline": "doctor data/what_if --json",
    "predict": f"predict {H100} --model 7B --memory 80GB --compute-seconds 0.2 --json",
    "predict-run": "predict --run hosts --preset ethernet-10g --hosts 2 --ranks-per-host 4 --json",
    "predict-score": "predict score data/bandwidth/aws_p5_h100_2n16g.csv --json --points",
    "predict-fit": "predict fit data/bandwidth/aws_p5_h100_2n16g.csv -o fabric.toml --json",
    "predict-simulate": "predict simulate ring --preset ethernet-10g --hosts 4 --bytes 4MB --slow-link 1:2=4 --json",
    "what-if": f"what-if {H100} --bytes 1GB --compute-seconds 0.25 --slow-rank 3=12% --price 2.5 --watts 700 --json",
    "what-if-run": "what-if hosts --repair 5 --json",
    "verify": "verify ring direct_all_to_all --ranks 4 --json --links",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_json_has_the_keys_it_had(name: str, command: Call, golden: Golden) -> None:
    _, out, error = command(COMMANDS[name])
    assert out, error
    golden.check(f"keys/{name}.txt", f"$ ringside {COMMANDS[name]}\n{keys_of(json.loads(out))}")


def test_bench_has_the_keys_it_had(command: Call, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run_launches", lambda *_: ([[report(0.0), report(2e-6)]], []))
    monkeypatch.setattr(bench, "make_plan", lambda _: (PLAN, []))
    status, out, _ = command("bench --json")
    assert status == 0
    assert departures("bench", json.loads(out)) == []
    golden.check("keys/bench.txt", keys_of(json.loads(out)))
    status, out, _ = command("bench")
    golden.check("texts/bench.txt", out.replace(f"on {bench.usable_cores()} cores", "on (this machine's) cores"))


def outcome(*, slow: float = 1.0) -> ProbeOutcome:
    """What a probe of four hosts found, one link of which has `slow` times the others' rate."""
    per_byte = np.full((4, 4), 1e-8)
    per_byte[0, 1] = per_byte[1, 0] = 1e-8 / slow
    network = CostNetwork(np.full((4, 4), 1e-4), per_byte, np.full(4, 5e-9), np.full(4, 5e-9))
    still = np.zeros((4, 4))
    found = Probe(network, network.rates, still)
    rings = {(0, 1, 2, 3): 0.2, (0, 2, 1, 3): 0.05}
    return ProbeOutcome(0, 4, tuple(f"node-{v}" for v in range(4)), (1,) * 4, probe=found, ring_s=rings)


@pytest.mark.parametrize(("name", "slow", "status"), [("probe", 1.0, 0), ("probe-slow", 0.25, 1)])
def test_a_probe_is_told_as_it_was(
    name: str, slow: float, status: int, command: Call, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(probe, "probe_job", lambda **_: outcome(slow=slow))
    assert command("probe --json -o topology.json") == (status, Path("topology.json").read_text(), "")
    golden.check(f"keys/{name}.txt", keys_of(json.loads(Path("topology.json").read_text())))
    found, out, _ = command("probe")
    golden.check(f"texts/{name}.txt", f"{out}exit status {found}\n")


class _Recorded:
    """A lab that has run already: one rank ended well, another was killed."""

    name, wiring, rate, delay_s, hosts = "ringside-1", "star", 1e9, 0.001, 2

    def __enter__(self) -> _Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, argv: list[str], *, sink: Callable[[RankPlacement, str, str], None], **_: object) -> RunResult:
        first, second = place_ranks([1, 1])
        sink(first, "stdout", "epoch 1")
        sink(second, "stderr", "a warning")
        ranks = RankResult(first, 0, "", "", 1.5, False), RankResult(second, -9, "", "", 1.25, False)
        return RunResult(ranks, 1.5, False, ((61_200_000, 61_400_000), (2_000, 999)))


def test_a_lab_is_told_as_it_was(command: Call, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "make_lab", lambda _: _Recorded())
    status, out, error = command("lab --json -- train.py")
    assert (status, error.splitlines()[:2]) == (137, ["[rank 0 host 0] epoch 1", "[rank 1 host 1] a warning"])
    assert departures("lab", json.loads(out)) == []
    golden.check("keys/lab.txt", keys_of(json.loads(out)))
    status, out, error = command("lab -- train.py")
    golden.check("texts/lab.txt", f"{out}stderr:\n{error}exit status {status}\n")


@pytest.mark.parametrize("run", ["demo", "hosts"])
def test_a_run_directory_has_the_keys_it_had(run: str, command: Call, golden: Golden) -> None:
    assert command(f"report {run} --json")[0] == 0
    here = Path(run)
    events = [json.loads(line) for line in (here / "events.jsonl").read_text().splitlines()]
    parts = {
        "run.json": json.loads((here / "run.json").read_text()),
        "steps.jsonl": [json.loads(line) for line in (here / "steps.jsonl").read_text().splitlines()],
        **{
            f"events.jsonl, {kind}": [e for e in events if e["kind"] == kind] for kind in {e["kind"]: 0 for e in events}
        },
        "summary.json": json.loads((here / "summary.json").read_text()),
    }
    golden.check(f"keys/run-{run}.txt", "".join(f"# {name}\n{keys_of(part)}\n" for name, part in parts.items()))


def test_what_is_recorded_has_the_fields_it_had(golden: Golden) -> None:
    schemas = msgspec.json.schema_components([RunInfo, StepRecord, Verdict], ref_template="{name}")[1]
    for schema in schemas.values():
        schema.pop("description", None)
    golden.check("keys/records.json", json.dumps(schemas, indent=1) + "\n")
