"""A run on disk: records, events, figures, and the registry of runs.

algorithm_changes  What a run notes when all-reduces between hosts change their algorithm: read from its events, and
                   described
directory          A run on disk: a directory of JSON and JSON lines that is readable at any moment, even after SIGKILL
records            What ranks record: small frozen values, written as they happen, read by detectors and views
registry           Which runs are going on this machine: one small file per run, so that views find them from another
                   shell
table              Step records as arrays [steps, ranks], bounded in memory: a long run is kept at a coarser stride
vitals_table       The vitals of a run as columns
"""
