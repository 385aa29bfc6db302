"""Parts of `bench.gpu` that no test and no other benchmark tries: NVML, `ringside run`, and NCCL's plugin.

python -m bench.gpu.parts nvml
python -m bench.gpu.parts launch
python -m bench.gpu.parts plugin RANKS        (several ranks share the first GPU)
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from bench.common import module_command, run_ranks_here
from bench.monitor.parallel_jobs import share_the_gpu

from ringside import _core
from ringside.errors import RingsideError
from ringside.monitor.nccl.ring import FOLDER_VARIABLE, STEPS_VARIABLE
from ringside.monitor.nccl.watch import PLUGIN_VARIABLE, NcclWatch
from ringside.monitor.vitals.gpu import name_reasons, open_gpu

CALLS, ELEMENTS, LATE_S = 60, 1 << 18, 0.002
BUSY_S = 3.0


def machine() -> dict[str, Any]:
    """Return what there is: GPU, versions, and None for what is not."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    try:
        plugin = str(_core.nccl_plugin().name)
    except RingsideError:
        plugin = None
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu and dist.is_nccl_available() else None,  # type: ignore[no-untyped-call]
        "nvml": importlib.util.find_spec("pynvml") is not None,
        "plugin": plugin,
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


def plugin(ranks: int) -> dict[str, Any]:
    """Return what NCCL's plugin recorded of ranks that share the GPU, over sockets; the last one is late."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        environ = {
            PLUGIN_VARIABLE: str(_core.nccl_plugin()), FOLDER_VARIABLE: folder, STEPS_VARIABLE: "1",
            "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
            "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/log-%p",
        }  # fmt: skip
        os.environ.update(environ)
        run_ranks_here(module_command("bench.gpu.parts", "rank"), ranks)
        watch = NcclWatch(Path(folder))
        watch.poll(is_last=True)
        report = watch.report()
        # A single rank makes no event: that it was opened is all that can be seen.
        if not report.processes or (ranks > 1 and not report.records):
            raise SystemExit(f"nothing was recorded: {watch.why_silent(environ)}")
        return {"ranks": ranks, **msgspec.to_builtins(report)}


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


def rank() -> dict[str, Any]:
    """Call NCCL as a rank of such a job."""
    mine, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share_the_gpu(mine)
    dist.init_process_group("nccl", timeout=timedelta(seconds=25))
    x = torch.ones(ELEMENTS, device="cuda")
    for _ in range(CALLS):
        if mine == ranks - 1:
            time.sleep(LATE_S)
        dist.all_reduce(x)
        torch.cuda.synchronize()
    dist.destroy_process_group()
    return {"calls": CALLS}


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    parts = {"nvml": nvml, "launch": launch, "rank": rank, "plugin": lambda: plugin(int(words[0]))}
    print(json.dumps(parts[what]()))
