"""What a recorded job would have taken if nobody had been slow.

graph       Replay a recorded step with other durations: a graph of operations, walked once for all steps and lanes
            together
stragglers  The what-if answers: how much faster without stragglers, and how much of it one worker or the last stage
            explains
"""
