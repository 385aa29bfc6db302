"""What NCCL's profiler interface tells of collectives; written by `_core/nccl_profiler.cpp` in every rank, read here.

`ring` takes the records of one process out of shared memory, `calls` makes collectives of them, `causes`
finds out who is late and why, `watch` does that for a host's ranks, `report` is what it writes into the run directory
(and where other profilers of NCCL's write logs), and `attribution` brings that into the run's verdicts.
"""
