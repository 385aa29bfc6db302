"""A run on disk: records, events, figures, and the registry of runs.

directory  A run on disk: a directory of JSON and JSON lines that is readable at any moment, even after SIGKILL
records    What ranks record: small frozen values, written as they happen, read by detectors and views; and events:
           where gradient buckets lie, and when an algorithm changed
registry   Which runs are going on this machine: one small file per run, so that views find them from another shell
table      Step records as arrays, bounded in memory: by step and rank, and vitals as rows of their own
"""
