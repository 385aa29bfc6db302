"""Reducers at the lab's switch, one job after the other, in one process (each would take seconds to import torch).

MASTER_ADDR=... python -m bench.lab.in_network PORT...
"""

from __future__ import annotations

import os
import sys

from ringside.pytorch.in_network_reducer import main

if __name__ == "__main__":
    for port in sys.argv[1:]:
        os.environ["MASTER_PORT"] = port
        main(["--timeout", "120"])
