"""Measures collectives: ours beside each peer, in turn, in the same processes.

`plan.py` says what to measure, `launch.py` starts the ranks and reads what they report (`messages.py`), `worker.py` is
one rank, `result.py` merges the ranks. `peers.py` opens the others; only there torch and mpi4py
are imported.
"""
