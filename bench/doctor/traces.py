"""How fast the doctor reads a large trace, and with how much memory: a trace of a given size, made and then read.

The trace is written by repeating the events of a recorded one, shifted in time, as torch.profiler would lay them out:

    python -m bench.doctor.traces                          # 1 GB, threads only
    python -m bench.doctor.traces --device --gzip          # 1 GB with device kernels, compressed
    python -m bench.doctor.traces --of traces/rank0.json   # made of your own trace
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.common import make_parser, module_command

TARGET_SECONDS, TARGET_BYTES = 30.0, 1.5e9  # for a trace of 1 GB


def main() -> int:
    """Write a trace, read it in a process of its own, print figures beside their targets."""
    parser = make_parser("bench.doctor.traces", __doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the trace, uncompressed")
    parser.add_argument("--gzip", action="store_true", help="compress it")
    parser.add_argument("--device", action="store_true", help="a step of a device instead of one of threads")
    parser.add_argument("--of", help="a trace to repeat")
    parser.add_argument("--folder", help="where to write it")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:  # the process of its own
        return _read_trace(options.read)
    if options.of:
        opener = gzip.open if options.of.endswith(".gz") else open
        with opener(options.of, "rb") as stream:
            events = [event for event in json.load(stream)["traceEvents"] if "ts" in event]
    else:
        events = made_up_step(device=options.device)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / f"rank0.pt.trace.json{'.gz' if options.gzip else ''}"
        count = write_trace(path, events, options.gigabytes * 1e9)
        print(f"{count} events, {options.gigabytes:g} GB, {path.stat().st_size / 1e9:.3f} GB on disk", flush=True)
        done = subprocess.run(module_command("bench.doctor.traces", "--read", str(path)), check=False)
        return done.returncode


def _read_trace(path: str) -> int:
    """Read a trace, print figures beside their targets; return 1 where one is missed."""
    from ringside.commands.doctor import OnStream
    from ringside.doctor import as_json, examine

    begin = time.perf_counter()
    found = as_json(examine([path], OnStream(sys.stderr, terminal=False)))
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(found["files"][0]["text"])
    print(f"{seconds:.1f} s (target {TARGET_SECONDS:.0f} s), {peak / 1e6:.0f} MB (target {TARGET_BYTES / 1e6:.0f} MB)")
    return 0 if seconds <= TARGET_SECONDS and peak <= TARGET_BYTES else 1


def made_up_step(*, device: bool) -> list[dict[str, Any]]:
    """Return the events of one step of 60 ms: 400 operations in threads, or those and their launches and kernels."""
    events: list[dict[str, Any]] = [_chrome_event("user_annotation", "ProfilerStep#0", 0.0, 60_000.0, {"Ev Idx": 0})]
    for number in range(400):
        start = 100.0 * number
        name = "torch::autograd::AccumulateGrad" if number > 300 and number % 4 == 0 else f"aten::op_{number % 40}"
        arguments = {"External id": number, "Concrete Inputs": ["", "[]", "1"],
                     "Ev Idx": number, "Input type": ["float", "ScalarList", "Scalar"],
                     "Input Strides": [[512, 1], [], []], "Input Dims": [[64, 512], [], []]}  # fmt: skip
        events.append(_chrome_event("cpu_op", name, start, 90.0, arguments))
        if device:
            launch = {"cbid": 211, "correlation": number, "External id": number}
            events.append(_chrome_event("cuda_runtime", "cudaLaunchKernel", start + 5, 4.0, launch))
            kernel = {
                "correlation": number,
                "stream": 7,
                "External id": number,
                "grid": [8, 1, 1],
                "block": [128, 1, 1],
            }
            events.append(
                _chrome_event("kernel", f"void at::native::kernel_{number % 30}<4>(int)", start + 20, 80.0, kernel)
            )
    for number in range(8):
        begin, dims = 20_000.0 + 5_000.0 * number, {"Input Dims": [[1 << 20]], "Input type": ["float"]}
        if device:
            said = {
                "Collective name": "allreduce",
                "In msg nelems": 1 << 20,
                "dtype": "Float",
                "Process Group Name": "0",
            }
            events.append(_chrome_event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", begin, 4_000.0, said))
        else:
            events.append(_chrome_event("user_annotation", "gloo:all_reduce", begin, 4_000.0, dims, tid=2))
    return events


def _chrome_event(cat: str, name: str, ts: float, dur: float, args: dict[str, Any], tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def write_trace(path: Path, events: list[dict[str, Any]], nbytes: float) -> int:
    """Write a trace of about `nbytes` bytes that repeats `events`; return how many events it holds."""
    head = '{\n  "schemaVersion": 1,\n  "distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 2},\n'
    first = min(event["ts"] for event in events)
    length = max(event["ts"] + event.get("dur", 0) for event in events) - first
    # Laid out as torch.profiler does: an event over five lines. Its `ts` is left open, as a format.
    parts = []
    for event in events:
        start = {key: event[key] for key in ("ph", "cat", "name") if key in event}
        rest = {key: value for key, value in event.items() if key not in (*start, "ts", "args")}
        opening, closing = (json.dumps(keys)[1:-1].replace("%", "%%") for keys in (start, rest))
        args = json.dumps(event.get("args", {})).replace("%", "%%")
        parts.append("  {\n    " + opening + ', "ts": %.3f,\n    ' + closing + ',\n    "args": ' + args + "\n  }")
    written = count = turn = 0
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as stream:
        stream.write((head + '  "traceEvents": [\n').encode())
        while written < nbytes:
            shift = turn * length
            text = ",\n".join(
                part % (event["ts"] - first + shift) if "ProfilerStep" not in part
                else part.replace("#0", f"#{turn}") % (event["ts"] - first + shift)
                for part, event in zip(parts, events, strict=True)
            ).encode()  # fmt: skip
            stream.write((b",\n" if turn else b"") + text)
            written, count, turn = written + len(text), count + len(events), turn + 1
        stream.write(b'\n  ],\n  "traceName": "x"\n}\n')
    return count


if __name__ == "__main__":
    sys.exit(main())
