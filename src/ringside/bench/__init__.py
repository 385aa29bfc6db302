"""Measures all-reduce: ours beside Gloo and Open MPI, in turn, in the same processes.

`plan.py` says what to measure, `launch.py` starts the ranks and reads what they report (`messages.py`), `worker.py` is
one rank, `result.py` merges the ranks, `table.py` renders. Only `peers/` imports torch or mpi4py.
"""
