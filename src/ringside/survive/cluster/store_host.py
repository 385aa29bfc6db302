"""The store of a job whose launcher gives none: `python -m ringside.survive.cluster.store_host PORT`.

torchrun's agent is where a job's store lives, and outlives its workers. Under srun, mpirun or a plain shell nobody has
one: there the keeper of rank 0 starts this, beside its worker. It ends with the keeper.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

from ringside.errors import RingsideError
from ringside.processes import die_with_parent


def is_needed(environ: Mapping[str, str]) -> bool:
    """Tell whether the launcher that gave this environment has no store, and this rank's keeper is to start one."""
    return environ.get("RANK") == "0" and environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def main(arguments: list[str]) -> int:
    """Serve a store until a signal ends the process; return the exit status where the port is taken."""
    die_with_parent(signal.SIGKILL, os.getppid())
    from torch._C._distributed_c10d import TCPStore  # which takes a second

    try:
        store = TCPStore("0.0.0.0", int(arguments[0]), is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        why = f"port {arguments[0]} cannot be served ({str(error).partition(chr(10))[0]})"
        print(f"ringside survive: {why}: two jobs share MASTER_PORT; give this one another", file=sys.stderr)
        return RingsideError.exit_status
    signal.pause()
    del store
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
