"""The engines we stand beside, and whether they can run here; their packages are imported by the ranks only."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess


def why_not(peer: str) -> str:
    """Return in one line why a peer cannot run here, or an empty string."""
    if peer == "gloo":
        return "" if importlib.util.find_spec("torch") else "torch is not installed"
    if not importlib.util.find_spec("mpi4py"):
        return "mpi4py is not installed (pip install mpi4py, with Open MPI from the system)"
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return "mpirun is not installed (Debian: apt install libopenmpi-dev openmpi-bin)"
    try:
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"mpirun does not answer ({error})"
    if "Open MPI" not in version.stdout and "OpenRTE" not in version.stdout:
        first = (version.stdout + version.stderr).strip().split("\n")[0]
        return f"mpirun is not Open MPI's ({first})"
    return ""
