"""How long the doctor takes for logs of single collectives of a large job, one rank of which the others wait for.

    python -m bench.doctor.calls [--form inspector] [--ranks 64] [--lines 100000]

Forms: NCCL's Inspector as by default, with its verbose traces, and v4.4 with proxy traces; Google's CoMMA with proxy
operations; torchcomms' ClogHook; and `ncclras -f json` of that many ranks, a line being a reading.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import make_parser
from bench.doctor.dumps import judged

START_US = 1_790_000_000_000_000  # when the job began, µs since 1970
LATE = 5  # the rank that comes last
COMMUNICATOR = "0x58aecebabb9e37af"


def main() -> None:
    parser = make_parser("bench.doctor.calls", __doc__)
    parser.add_argument("--form", choices=FORMS, default="inspector", help="who has written them (default: inspector)")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--lines", type=int, default=100_000, help="calls in each log")
    args = parser.parse_args()
    print(f"{'ranks':>6} {'lines':>7} {'MB':>7} {'wall s':>7} {'CPU s':>7} {'peak MB':>8}  verdict")
    with tempfile.TemporaryDirectory() as folder:
        nbytes = FORMS[args.form](Path(folder), args.ranks, args.lines)
        print(f"{args.ranks:6} {args.lines:7} {nbytes / 1e6:7.1f} {judged(folder)}")


def write_logs(
    folder: Path, ranks: int, lines: int, of_call: Callable[..., str], head: str = "", tail: str = ""
) -> int:
    """Write one log per rank, eight ranks to a host; return their bytes.

    Args:
        folder: Where.
        ranks: How many.
        lines: Calls in each.
        of_call: Returns what is written of one: of a rank, of how many, its number and how long it took, µs.
        head: Stands before, with the rank and their number for {rank} and {ranks}.
        tail: Stands behind.
    """
    total = 0
    for rank in range(ranks):
        # who comes last is in the collective for the shortest time
        least_us = 1_000 if rank == min(LATE, ranks - 1) else 5_000
        took_us = np.random.default_rng(rank).integers(least_us, least_us + 200, lines)
        with (folder / f"node{rank // 8}-pid{1000 + rank}.log").open("w") as log:
            log.write(head.format(rank=rank, ranks=ranks))
            for number, own_us in enumerate(took_us.tolist(), 1):
                log.write(of_call(rank, ranks, number, own_us))
            log.write(tail)
            total += log.tell()
    return total


def _inspector(rank: int, ranks: int, number: int, took_us: int, version: str = "v4.0", more: str = "") -> str:
    header = f'{{"id":"{COMMUNICATOR}","comm_name":"unknown","rank":{rank},"n_ranks":{ranks},"nnodes":8}}'
    what = f'"inspector_output_format_version":"{version}","git_rev":"","rec_mechanism":"nccl_profiler_interface"'
    place = f'"hostname":"node{rank // 8}","pid":{1000 + rank}'
    metadata = f'{{{what},"dump_timestamp_us":{START_US + 11_000 * number},{place}}}'
    rest = '"coll_timing_source":"kernel_gpu","coll_algobw_gbs":277.210914,"coll_busbw_gbs":485.119099'
    perf = f'{{"coll":"AllReduce","coll_sn":{number},"coll_msg_size_bytes":1073741824,"coll_exec_time_us":{took_us},'
    if version == "v4.0":
        return f'{{"header":{header},"metadata":{metadata},"coll_perf":{perf}{rest}{more}}}}}\n'
    marker = f'{{"header":{header},"metadata":{metadata},"dump_stats":{{"coll_records":50,"coll_dropped_total":0}}}}\n'
    return f'{marker if number % 50 == 1 else ""}{{"coll_perf":{perf}{rest}}}}}\n{more}'


def _verbose(rank: int, ranks: int, number: int, took_us: int) -> str:
    """With eight channels."""
    end = START_US + 11_000 * number
    times = ("start", end - took_us), ("stop", end), ("record", end)
    more = ""
    for trace, of in (("event_trace_sn", "sn"), ("event_trace_ts", "ts")):
        kernel = ",".join(f'"kernel_{name}_{of}":{value}' for name, value in times)
        events = ",".join(f'{{"channel_id":{channel},{kernel}}}' for channel in range(8))
        more += f',"{trace}":{{"coll_start_{of}":{end - took_us},"coll_stop_{of}":{end},"kernel_events":[{events}]}}'
    return _inspector(rank, ranks, number, took_us, more=more)


def _proxies(rank: int, ranks: int, number: int, took_us: int) -> str:
    steps = ",".join(['{"trans_size_bytes":1048576,"gpu_produce_us":50,"peer_credit_us":5,"wire_us":200}'] * 4)
    trace = f'{{"record_type":"proxy_op","peer":{(rank + 1) % ranks},"direction":"send","steps":[{steps}]}}'
    return _inspector(rank, ranks, number, took_us, "v4.4", f'{{"proxy_trace":{trace}}}\n')


def _comma(rank: int, ranks: int, number: int, took_us: int) -> str:
    end = 11_000 * number
    steps = [{"end_time": end, "size": 1 << 17, "start_time": end - 900, "step": step} for step in range(4)]
    proxy = {"cat": "PROXY", "chunk_size": 1 << 19, "dur": 900, "is_send": True, "n_steps": 4, "name": "ProxyOp"}
    event: dict[str, Any] = {
        "args": {"size": 1 << 20}, "cat": "COLL", "child_dur": took_us, "comm_hash": COMMUNICATOR, "dur": 12,
        "name": "all_reduce", "ph": "X", "rank": rank, "seq_num": number, "ts": end - took_us,
        "proxyops": [{**proxy, "peer": (rank + 1) % ranks, "ph": "X", "pid": 169, "ts": end - 900, "steps": steps}],
    }  # fmt: skip
    return f"{',' if number > 1 else ''}{json.dumps(event, separators=(',', ':'))}\n"


def _clog(rank: int, ranks: int, number: int, took_us: int) -> str:
    end_s = 0.011 * number
    start_s = end_s - took_us / 1e6
    return f"C1|Q|work_id={number}|+{start_s:.3f}\nC1|S|+{start_s:.3f}\nC1|E|+{end_s:.3f}\nC1|W|+{end_s:.3f}\n"


def write_readings(folder: Path, ranks: int, lines: int) -> int:
    """Write what `ncclras -f json` says of a job that moves, every ten seconds, into one file; return its bytes."""
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    with (folder / "ras.json").open("w") as log:
        for number in range(lines):
            members = [
                {
                    "rank": rank, "host": f"10.0.0.{rank // 8}", "pid": 1000 + rank, "cuda_dev": rank % 8,
                    "nvml_dev": rank % 8, "status": status,
                    "collective_counts": {"Broadcast": 0, "AllGather": 0, "AllReduce": 1000 * number + rank},
                }
                for rank in range(ranks)
            ]  # fmt: skip
            reading = {
                "nccl_version": "2.30.7",
                "timestamp": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(START_US / 1e6 + 10 * number)),
                "communicators_count": 1,
                "communicators": [{"hash": COMMUNICATOR, "size": ranks, "ranks": members, "missing_ranks": []}],
            }
            log.write(json.dumps(reading, indent=2) + "\n")
        return log.tell()


_CLOG_HEAD = (
    f"V|1|base_timestamp={START_US / 1e6:.3f}\nnew_comm|comm=world|rank={{rank}}|world_size={{ranks}}\n"
    "C1|sig|all_reduce|in_count=1024|out_count=1024|dtype=f32|red_op=sum|async_op=t|comm=world\n"
)
FORMS: dict[str, Callable[[Path, int, int], int]] = {
    "inspector": partial(write_logs, of_call=_inspector),
    "verbose": partial(write_logs, of_call=_verbose),
    "proxies": partial(write_logs, of_call=_proxies),
    "comma": partial(write_logs, of_call=_comma, head="[\n", tail="]\n"),
    "clog": partial(write_logs, of_call=_clog, head=_CLOG_HEAD),
    "ras": write_readings,
}


if __name__ == "__main__":
    main()
