"""Parts of `bench.gpu` that no test and no other benchmark tries: NVML, `ringside run`, and NCCL's plugin.

python -m bench.gpu.parts nvml
python -m bench.gpu.parts launch
python -m bench.gpu.parts slow-link        (ranks on hosts of the network lab, one of which sends slowly)
python -m bench.gpu.parts plugin RANKS        (several ranks share the first GPU)
python -m bench.gpu.parts plugin RANKS --record FOLDER        (and every call of NCCL's, for tests/data/nccl)
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from bench.common import ROOT, make_parser, module_command, run_ranks_here
from bench.monitor.parallel_jobs import SHARING_NCCL, nccl_version, share_the_gpu, sharing

from ringside import _core
from ringside.engine.topology import cache_bytes, read_cpus, usable_cores
from ringside.errors import RingsideError
from ringside.lab import Lab
from ringside.lab.wiring import INTERFACE
from ringside.monitor.nccl.causes import LATE_RANK
from ringside.monitor.nccl.ring import FOLDER_VARIABLE, STEPS_VARIABLE
from ringside.monitor.nccl.watch import PLUGIN_VARIABLE, NcclWatch
from ringside.monitor.vitals.gpu import name_reasons, open_gpu

CALLS, ELEMENTS, LATE_S = 60, 1 << 18, 0.002
BUSY_S = 3.0
LINK_HOSTS, LINK_RATE, SLOW_SENDER, SLOW_RATE, LINK_LIMIT_S = 4, "2gbit", 2, "200mbit", 40.0
LINK_CALLS, LINK_ELEMENTS = 8, 1 << 22
"""A send is over, for NCCL's sockets, when the kernel has taken it: calls must be larger than what that keeps."""
RECORDED_CALLS, SMALL, LARGE = 12, 1 << 8, 1 << 20
"""Of each kind while NCCL's calls are recorded; elements."""
RECORDED = ("collectives", "messages", "communicators", "graph")
"""Each in a job of its own: one that hangs or aborts takes no other recording with it."""
RECORDED_LIMIT_S = 60


def machine() -> dict[str, Any]:
    """Return what there is: GPU, versions, and None for what is not."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    try:
        plugin = str(_core.nccl_plugin().name)
    except RingsideError:
        plugin = None
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl_version())) if gpu and dist.is_nccl_available() else None,
        "nvml": importlib.util.find_spec("pynvml") is not None,
        "plugin": plugin,
        "cpu": models[0] if models else platform.machine(),
        "cores": usable_cores(),
        "numa_nodes": len({cpu.node for cpu in read_cpus(os.sched_getaffinity(0))}),
        "cache_bytes": cache_bytes(),
    }


def nvml() -> dict[str, Any]:
    """Return what NVML tells of the GPU at rest and at work, and what keeps its clock down."""
    gpu = open_gpu(str(torch.cuda.get_device_properties(0).uuid))
    if gpu is None:
        raise SystemExit("NVML cannot be read")
    found: dict[str, Any] = {"at_rest": gpu.read()}
    x, ends = torch.randn(4096, 4096, device="cuda"), time.monotonic() + BUSY_S
    while time.monotonic() < ends:
        x = (x @ x).clamp(-1, 1)
        torch.cuda.synchronize()
    found["at_work"] = gpu.read()
    found["reasons"] = {when: name_reasons(int(found[when].get("gpu_reasons", 0))) for when in ("at_rest", "at_work")}
    gpu.close()
    return found


def plugin(ranks: int, record: Path | None, interface: int, mask: int) -> dict[str, Any]:
    """Return what NCCL's plugin recorded of ranks that share the GPU, over sockets; the last one is late.

    Args:
        ranks: How many.
        record: Where every call of NCCL's is written to, a file per rank and job of `RECORDED`; None: nowhere.
        interface: The newest version that NCCL may speak while they are.
        mask: Events that it is asked for besides the plugin's own.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, sharing() as shares:
        environ = {
            PLUGIN_VARIABLE: str(_core.nccl_plugin()), FOLDER_VARIABLE: folder, STEPS_VARIABLE: "1",
            "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
            "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/log-%p",
        }  # fmt: skip
        os.environ.update(environ)
        told: dict[str, Any] = {"ranks": ranks, "mps": shares}
        if record is None:
            run_ranks_here(module_command("bench.gpu.parts", "rank", "--per-host", str(ranks_per_host(ranks))), ranks)
        else:
            told["recorded"] = record_calls(ranks, record, interface, mask)
        told |= read_rings(Path(folder), environ, ranks)
        late = {blame["rank"] for blame in told["blames"] if blame["cause"] == LATE_RANK}
        if record is None and ranks > 1 and late != {ranks - 1}:
            raise SystemExit(f"rank {ranks - 1} came late, and of late ranks these were named: {json.dumps(told)}")
        return told


def ranks_per_host(ranks: int) -> int:
    """Return how many ranks NCCL is to take for ranks of one host; 0: as they are.

    Two on a host copy within the GPU, whatever NCCL_P2P_DISABLE says: so four are of two hosts, for links between them.
    """
    return 2 if ranks >= 4 and nccl_version() >= SHARING_NCCL else 0


def read_rings(folder: Path, environ: Mapping[str, str], ranks: int) -> dict[str, Any]:
    """Return what the rings of a job that is over say; one without any ends this process with the reason."""
    watch = NcclWatch(folder)
    watch.poll(is_last=True)
    report = watch.report()
    # A single rank makes no event: that it was opened is all that can be seen.
    if not report.processes or (ranks > 1 and not report.records):
        raise SystemExit(f"nothing was recorded: {watch.why_silent(environ)}")
    told: dict[str, Any] = msgspec.to_builtins(report)
    return told


def slow_link() -> dict[str, Any]:
    """Return what NCCL's plugin recorded of ranks on hosts of the lab, one of which sends slowly; all are in time."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        sharing() as shares,
        Lab(hosts=LINK_HOSTS, rate=LINK_RATE) as lab,
    ):
        environ = {
            PLUGIN_VARIABLE: str(_core.nccl_plugin()), FOLDER_VARIABLE: folder, STEPS_VARIABLE: "1",
            "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/log-%p", "NCCL_IB_DISABLE": "1",
        }  # fmt: skip
        shaping = ["tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", "rate", SLOW_RATE, "burst", "64kb"]
        inside = ["ip", "netns", "exec", lab.namespace(SLOW_SENDER)]
        subprocess.run([*inside, *shaping, "limit", "1mb"], check=True, timeout=20)
        words = ["--late", "0", "--per-host", "1", "--calls", str(LINK_CALLS), "--elements", str(LINK_ELEMENTS)]
        command = module_command("bench.gpu.parts", "rank", *words)
        lab.run(command, environ, timeout_s=LINK_LIMIT_S, after_failure_s=5.0).check()
        told = read_rings(Path(folder), environ, LINK_HOSTS)
        named = [(blame["rank"], blame["peer"]) for blame in told["blames"] if blame["cause"] == "slow link"]
        if [sender for sender, _ in named] != [SLOW_SENDER]:
            raise SystemExit(f"rank {SLOW_SENDER} sends slowly, and of slow links these were named: {json.dumps(told)}")
        return {"sender": SLOW_SENDER, "mps": shares, **told}


def launch() -> dict[str, Any]:
    """Return how many ranks `ringside run` starts where no number is given: one for each GPU."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "told.py"
        script.write_text("import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n")
        ran = subprocess.run([*module_command("ringside", "run"), str(script)], capture_output=True, text=True)
    gpus = torch.cuda.device_count()
    if ran.returncode or sorted(set(re.findall(r"rank \d+ of \d+", ran.stdout))) != sorted(
        f"rank {number} of {gpus}" for number in range(gpus)
    ):
        raise SystemExit(f"{gpus} GPUs, exit status {ran.returncode}, and it printed {ran.stdout + ran.stderr!r}")
    return {"gpus": gpus, "ranks": gpus}


def record_calls(ranks: int, record: Path, interface: int, mask: int) -> dict[str, Any]:
    """Let jobs call NCCL with the recorder between it and our plugin; return what each of them did, and the files."""
    record.mkdir(parents=True, exist_ok=True)
    asked = f"-mask{mask}" if mask else ""
    done: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        library = Path(made, "recorder.so")
        includes = [f"-I{ROOT / 'src/ringside/_core'}", f"-I{ROOT / 'tests/native'}"]
        build = ["c++", "-std=c++17", "-O2", "-fPIC", "-shared", f"-DNEWEST={interface}", *includes]
        subprocess.run([*build, str(ROOT / "tests/native/nccl_recorder.cpp"), "-o", str(library)], check=True)
        os.environ |= {"RINGSIDE_RECORDED_PLUGIN": os.environ[PLUGIN_VARIABLE], PLUGIN_VARIABLE: str(library)}
        os.environ |= {"RINGSIDE_RECORD_DIR": made, "RINGSIDE_RECORDED_MASK": str(mask)}
        for what in RECORDED:
            try:
                words = ["--record", what, "--per-host", str(ranks_per_host(ranks))]
                done[what] = run_ranks_here(module_command("bench.gpu.parts", "rank", *words), ranks)
            except (SystemExit, subprocess.TimeoutExpired) as error:
                done[what] = {"failed": str(error)}
            for path in sorted(Path(made).glob("calls-*.txt")):
                version_and_rank = path.name.rpartition("-")[0]
                name = f"{version_and_rank}-{what}{asked}-nccl{machine()['nccl']}.txt.gz"
                Path(record, name).write_bytes(gzip.compress(path.read_bytes(), mtime=0))
                path.unlink()
    files = {path.name: path.stat().st_size for path in sorted(record.glob("calls-*.txt.gz"))}
    return {"jobs": done, "bytes": files}


def rank(record: str | None, late_s: float, per_host: int, calls: int, elements: int) -> dict[str, Any]:
    """Call NCCL as a rank of such a job.

    Args:
        record: What is done while its calls are recorded, one of `RECORDED`; None: all-reduces.
        late_s: The last rank comes so much later to each, seconds.
        per_host: So many ranks are on one host, as NCCL sees it; 0: as `share_the_gpu` has it.
        calls: How many all-reduces.
        elements: Of each, float32.
    """
    mine, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share_the_gpu(mine)
    if per_host:
        os.environ["NCCL_HOSTID"] = f"host {mine // per_host}"
    dist.init_process_group("nccl", timeout=timedelta(seconds=25))
    kinds: dict[str, Callable[[], Any]]
    if record is None:
        x = torch.ones(elements, device="cuda")
        count, kinds = calls, {"all_reduce": lambda: dist.all_reduce(x)}
    else:
        signal.alarm(RECORDED_LIMIT_S)  # ends a rank that hangs, also within NCCL
        count, kinds = RECORDED_CALLS, recorded_kinds(record, mine, ranks)
    failed: dict[str, str] = {}
    for name, call in kinds.items():
        try:
            for _ in range(count):
                if mine == ranks - 1:
                    time.sleep(late_s)
                call()
                torch.cuda.synchronize()
        except Exception as error:
            if record is None:
                raise
            failed[name] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return {"calls": count, "done": [name for name in kinds if name not in failed], "failed": failed}


def recorded_kinds(record: str, mine: int, ranks: int) -> dict[str, Callable[[], Any]]:
    """Return what a rank calls while NCCL's calls are recorded, by name.

    Args:
        record: One of `RECORDED`.
        mine: This rank.
        ranks: How many there are.
    """
    small, large = (torch.ones(size, device="cuda") for size in (SMALL, LARGE))
    if record == "collectives":
        gathered = torch.empty(ranks * SMALL, device="cuda")
        return {
            "small all_reduce": lambda: dist.all_reduce(small),
            "large all_reduce": lambda: dist.all_reduce(large),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(gathered, small),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(small, gathered),
            "broadcast": lambda: dist.broadcast(large, 0),
        }
    if record == "messages":
        received = torch.empty(SMALL, device="cuda")

        def pass_on() -> None:
            send = dist.P2POp(dist.isend, small, (mine + 1) % ranks)
            receive = dist.P2POp(dist.irecv, received, (mine - 1) % ranks)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()

        def pair() -> None:
            if mine == 0:
                dist.send(small, 1)
            elif mine == 1:
                dist.recv(received, 0)

        return {"small all_reduce": lambda: dist.all_reduce(small), "batch_isend_irecv": pass_on, "send and recv": pair}
    if record == "communicators":
        other = dist.new_group()

        def both() -> None:
            works = [dist.all_reduce(small, async_op=True), dist.all_reduce(large, group=other, async_op=True)]
            for work in works:
                work.wait()

        def remade() -> None:
            group = dist.new_group()
            dist.all_reduce(small, group=group)
            torch.cuda.synchronize()
            dist.destroy_process_group(group)

        return {"two at a time": both, "made and closed": remade}

    def replayed() -> None:
        dist.all_reduce(small)  # connects: that cannot be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            dist.all_reduce(small)
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
        graph.reset()  # the communicator cannot be closed before

    return {"captured all_reduce": replayed}


def main() -> None:
    parser = make_parser("bench.gpu.parts", __doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("nvml")
    commands.add_parser("launch")
    commands.add_parser("slow-link")
    with_plugin, as_rank = commands.add_parser("plugin"), commands.add_parser("rank", help=argparse.SUPPRESS)
    with_plugin.add_argument("ranks", type=int)
    with_plugin.add_argument("--record", type=Path, metavar="FOLDER", help="write every call of NCCL's there")
    with_plugin.add_argument("--interface", type=int, default=6, help="the newest version NCCL may speak (default: 6)")
    with_plugin.add_argument("--mask", type=int, default=0, help="also record these events; 4095: all of version 5")
    as_rank.add_argument("--record", choices=RECORDED)
    as_rank.add_argument("--late", type=float, default=LATE_S)
    as_rank.add_argument("--per-host", type=int, default=0)
    as_rank.add_argument("--calls", type=int, default=CALLS)
    as_rank.add_argument("--elements", type=int, default=ELEMENTS)
    args = parser.parse_args()
    if args.what in ("nvml", "launch", "slow-link"):
        told = {"nvml": nvml, "launch": launch, "slow-link": slow_link}[args.what]()
    elif args.what == "rank":
        told = rank(args.record, args.late, args.per_host, args.calls, args.elements)
    else:
        told = plugin(args.ranks, args.record, args.interface, args.mask)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
