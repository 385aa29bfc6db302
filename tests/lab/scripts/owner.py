"""Owns a lab until it is ended."""

from __future__ import annotations

import sys

from ringside.lab import Lab

with Lab(hosts=2, ranks_per_host=1, delay_s=float(sys.argv[1])) as lab:
    spawned = lab.spawn(0, ["sleep", "600"])
    print(lab.name, flush=True)
    lab.run(["sh", "-c", "echo rank >&2; exec sleep 600"], timeout_s=600, sink=lambda *_: print("rank", flush=True))
