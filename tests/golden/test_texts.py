"""What commands print on recorded input, 80 columns wide, stdout and then the exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.golden.calls import Call
from tests.support.golden import Golden

H100 = "--preset dgx-h100 --hosts 4"
FOUR_HOSTS = "--preset ethernet-10g --hosts 4"
TEXTS = {
    "report/demo": "report demo",
    "report/hosts": "report hosts",
    "report/demo-markdown": "report demo --markdown",
    "report/hosts-markdown": "report hosts --markdown",
    "top/demo": "top --once demo",
    "top/hosts": "top --once hosts",
    "top/hosts-by-wait": "top --once hosts --sort wait --reverse",
    "top/hosts-some": "top --once hosts --sort rank --filter 2-5",
    "compare/the-same": "compare demo demo --fail-over 5%",
    "compare/slower": "compare demo hosts --fail-over 5%",
    "compare/faster": "compare hosts demo --warm-up 10",
    "doctor/runs": "doctor demo hosts",
    "doctor/dumps": "doctor data/flight_recorder/gpu_error_1st",
    "doctor/locked": "doctor data/flight_recorder/lock_gil_1st",
    "doctor/traces": "doctor data/kineto/dlrm_8rank.tar.gz",
    "doctor/one-trace": "doctor data/kineto/rank_not_found.json.gz",
    "doctor/timeline": "doctor data/what_if",
    "doctor/nothing": "doctor data/licences",
    "predict/h100": f"predict {H100} --model 7B --memory 80GB",
    "predict/no-fit": "predict --preset dgx-a100 --hosts 1 --model 700B",
    "predict/all": "predict --preset ethernet-10g --hosts 8 --bytes 100MB --compute-seconds 0.25 --all",
    "predict/batch": f"predict {H100} --bytes 1GB --batch-per-rank 4 --accumulate 8 --base-batch 256 --dtype fp32",
    "predict/one-algorithm": f"predict {H100} --bytes 25MiB --algorithm ring",
    "predict/run": "predict --run hosts --preset ethernet-10g --hosts 2 --ranks-per-host 4",
    "predict/score": "predict score data/bandwidth/aws_p5_h100_2n16g.csv data/bandwidth/osu_2n2r_pod.csv",
    "predict/score-larger": "predict score data/bandwidth/mi300x_2n16g.csv --fit-below 16M",
    "predict/score-preset": "predict score data/bandwidth/dgxc_h100_1n8g.csv --preset auto",
    "predict/score-refused": "predict score data/bandwidth/h100_2n4g.csv [red]none.csv",
    "predict/score-nothing": "predict score --fit data/bandwidth/h100_2n4g.csv --test [red]none.csv --json",
    "predict/score-clusters": (
        "predict score --fit data/bandwidth/osu_cpu_32nodes.csv --test data/bandwidth/osu_cpu_64nodes.csv "
        "--p2p data/bandwidth/osu_p2p_bw_32nodes.csv data/bandwidth/osu_p2p_latency_32nodes.csv"
    ),
    "predict/simulate": f"predict simulate ring {FOUR_HOSTS} --bytes 4MB --slow-link 1:2=4 --late 3=5ms",
    "predict/simulate-hosts": "predict simulate hierarchical --preset p5 --hosts 2 --bytes 1GB --segments 2",
    "what-if/slow-rank": f"what-if {H100} --bytes 1GB --compute-seconds 0.25 --slow-rank 3=12% --price 2.5 --watts 700",
    "what-if/link": "what-if --preset dgx-a100 --hosts 4 --bytes 1GB --slow-link 7:8=4",
    "what-if/rail": f"what-if {H100} --model 7B --compute-seconds 0.2 --lose-rail 2 --oversubscribe 2",
    "what-if/other": f"what-if {H100} --bytes 1GB --to-hosts 8 --to-algorithm tree --bucket 50MB",
    "what-if/run": "what-if hosts --repair 5",
    "what-if/run-on-hardware": "what-if hosts --preset ethernet-10g --hosts 2 --ranks-per-host 4 --bucket 2MB --sharp",
    "verify/all": "verify --all --ranks 1-8",
    "verify/some": "verify ring two_tree --ranks 2,5,16 --buffers 2",
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_printed_is_as_it_was(name: str, command: Call, golden: Golden) -> None:
    Path("[red]none.csv").write_text("no,columns\n")
    status, out, _ = command(TEXTS[name])
    golden.check(f"texts/{name}.txt", f"$ ringside {TEXTS[name]}\n{out}exit status {status}\n")
