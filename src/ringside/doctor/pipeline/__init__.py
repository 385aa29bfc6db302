"""Timelines of pipeline-parallel jobs, as a graph of operations.

graph      From a pipeline timeline to what waits for what: compute order, sends and receives, data-parallel collectives
reader     What if nobody had been slow: a recorded pipeline timeline, with its metadata beside it, replayed
recording  From a pipeline timeline to a recording that can be replayed: the same operations in all steps and lanes
timeline   A pipeline timeline: what every worker did in every step, as recorded in a Chrome trace
"""
