"""How long the doctor takes for the Inspector's logs of a large job: 64 ranks, one of which the others wait for.

python -m bench.doctor.calls [--ranks 64] [--lines 100000]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from bench.common import make_parser
from bench.doctor.dumps import judged

START_US = 1_790_000_000_000_000  # when the job began, µs since 1970
LATE = 5  # the rank that comes last


def main() -> None:
    parser = make_parser("bench.doctor.calls", __doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--lines", type=int, default=100_000, help="calls in each log")
    args = parser.parse_args()
    print(f"{'ranks':>6} {'lines':>7} {'MB':>7} {'wall s':>7} {'CPU s':>7} {'peak MB':>8}  verdict")
    with tempfile.TemporaryDirectory() as folder:
        nbytes = write_logs(Path(folder), args.ranks, args.lines)
        print(f"{args.ranks:6} {args.lines:7} {nbytes / 1e6:7.1f} {judged(folder)}")


def write_logs(folder: Path, ranks: int, lines: int) -> int:
    """Write one log per rank as v4.0 of the Inspector does, eight ranks to a host; return their bytes."""
    total = 0
    for rank in range(ranks):
        header = f'{{"id":"0x58aecebabb9e37af","comm_name":"unknown","rank":{rank},"n_ranks":{ranks},"nnodes":8}}'
        version = '"inspector_output_format_version":"v4.0","git_rev":"","rec_mechanism":"nccl_profiler_interface"'
        place = f'"hostname":"node{rank // 8}","pid":{1000 + rank}'
        rest = '"coll_timing_source":"kernel_gpu","coll_algobw_gbs":277.210914,"coll_busbw_gbs":485.119099'
        # who comes last is in the collective for the shortest time
        least_us = 1_000 if rank == LATE else 5_000
        took_us = np.random.default_rng(rank).integers(least_us, least_us + 200, lines)
        with (folder / f"node{rank // 8}-pid{1000 + rank}.log").open("w") as log:
            for number, own_us in enumerate(took_us.tolist(), 1):
                log.write(
                    f'{{"header":{header},"metadata":{{{version},"dump_timestamp_us":{START_US + 11_000 * number},'
                    f'{place}}},"coll_perf":{{"coll":"AllReduce","coll_sn":{number},"coll_msg_size_bytes":1073741824,'
                    f'"coll_exec_time_us":{own_us},{rest}}}}}\n'
                )
            total += log.tell()
    return total


if __name__ == "__main__":
    main()
