"""Timelines of pipeline-parallel jobs, as a graph of operations.

reader    What if nobody had been slow: a recorded pipeline timeline, with its metadata beside it, as a graph of what
          waits for what, replayed
timeline  A pipeline timeline: what every worker did in every step, as recorded in a Chrome trace
"""
