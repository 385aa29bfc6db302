"""Open MPI's all-reduce over the lab's hosts: mpirun with an agent that enters a host's namespace in place of ssh.

python -m bench.lab.open_mpi SIZES ROUNDS      (what a rank runs; rank 0 prints JSON: seconds by size)
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.common import last_json, module_command, numbers

_LIMIT_S = 120.0
# From so many bytes on a size has only so many turns.
_LARGE_BYTES, _LARGE_TURNS = 1 << 20, 3
# A turn lasts about so long, but has at most so many calls.
_TURN_S, _MOST_ITERATIONS = 0.05, 2000


def all_reduce_seconds(lab: object, sizes: Sequence[int], rounds: int) -> tuple[dict[int, float], str]:
    """Return the median time of Open MPI's all-reduce (float32, sum) by size, and why there is none.

    Args:
        lab: An open `ringside.lab.Lab`.
        sizes: Bytes.
        rounds: Turns of every size.
    """
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        return {}, "Open MPI: not measured: there is no mpirun or no mpi4py here"
    from ringside.lab import Lab

    assert isinstance(lab, Lab)
    with tempfile.TemporaryDirectory() as name:
        # mpirun calls it as `agent HOST COMMAND...`. Hosts of the lab share a name; Open MPI tells hosts apart by it.
        agent = Path(name) / "agent"
        cases = "".join(
            f"  {lab.address(h)}) exec ip netns exec {lab.namespace(h)} "
            f'unshare --uts sh -c "hostname lab-host-{h}; $*";;\n'
            for h in range(lab.hosts)
        )
        agent.write_text(f'#!/bin/sh\nhost=$1; shift\ncase "$host" in\n{cases}esac\nexit 1\n')
        agent.chmod(0o755)
        hosts = ",".join(f"{lab.address(h)}:{count}" for h, count in enumerate(lab.ranks_per_host))
        options = {
            "plm_rsh_agent": str(agent),
            "plm_rsh_no_tree_spawn": "1",
            "btl": "tcp,vader,self",
            "pml": "ob1",
            "btl_tcp_if_include": "lab0",
            "oob_tcp_if_include": "lab0",
        }
        words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--host", hosts]
        words += [word for key, value in options.items() for word in ("--mca", key, value)]
        words += ["-n", str(sum(lab.ranks_per_host))]
        words += module_command("bench.lab.open_mpi", ",".join(map(str, sizes)), str(rounds))
        child = lab.spawn(
            0,
            ["unshare", "--uts", "sh", "-c", 'hostname lab-host-0; exec "$@"', "sh", *words],
            {"OMPI_MCA_orte_tmpdir_base": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            out, err = child.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            child.terminate()
            return {}, f"Open MPI: not measured: it did not end within {_LIMIT_S:g} s"
    if child.returncode:
        lines = [line for line in err.splitlines() if line.strip() and not line.startswith("---")]
        return {}, f"Open MPI: not measured: {lines[0] if lines else 'mpirun said nothing'}"
    found = last_json(out)
    return {int(size): seconds for size, seconds in found.items()}, ""


def main(sizes: Sequence[int], rounds: int) -> None:
    """Measure, as one rank."""
    import mpi4py

    mpi4py.rc.threads = False
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    turns: dict[int, list[float]] = {size: [] for size in sizes}
    arrays = {size: np.zeros(size // 4, dtype=np.float32) for size in sizes}

    def measure(size: int, iterations: int) -> float:
        """Return the time of a call on the slowest rank; a lab's hosts share a clock, so do these times."""
        world.Barrier()
        start = time.perf_counter()
        for _ in range(iterations):
            world.Allreduce(MPI.IN_PLACE, [arrays[size], MPI.FLOAT])
        end = time.perf_counter()
        return float(world.allreduce(end, MPI.MAX) - world.allreduce(start, MPI.MAX)) / iterations

    fitting = {size: max(1, min(_MOST_ITERATIONS, round(_TURN_S / max(measure(size, 1), 1e-6)))) for size in sizes}
    for number in range(rounds):
        for size in sizes:
            if number < _LARGE_TURNS or size < _LARGE_BYTES:
                turns[size].append(measure(size, fitting[size]))
    if world.Get_rank() == 0:
        print(json.dumps({size: median(times) for size, times in turns.items()}), flush=True)


if __name__ == "__main__":
    main(numbers(sys.argv[1]), int(sys.argv[2]))
