"""Timelines of pipeline-parallel jobs, as a graph of operations.

graph     From a pipeline timeline to a recording that can be replayed: what waits for what, and how long it took
reader    What if nobody had been slow: a recorded pipeline timeline, with its metadata beside it, replayed
timeline  A pipeline timeline: what every worker did in every step, as recorded in a Chrome trace
"""
