"""torch.profiler's traces: who held the job up, and what is exposed.

collector  From the events of a trace to plain values: batches in, columns kept, collectives and steps at the end
match      The same collective on all ranks: matched by group and sequence number, waits, lateness, clocks
reader     Kineto traces (torch.profiler's) of one or many ranks: who worked, who waited, for whom, what it
           cost, and what if no rank had been slow
report     The four questions of a profile, answered with numbers from the traces of a job
steps      What one rank did in each step: work, communication hidden behind it and exposed, idle, and the tail of
           backward
straggler  Who held a traced job up: the persistent culprit, and not the rank that happens to be last in some step
trace      One rank's trace as plain values: its steps, its collectives, when it worked
"""
