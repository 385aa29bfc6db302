"""A run as a value that views read: recorded, live, or two compared.

comparison     Two runs side by side: what changed, and whether by more than chance
follower       A run as far as it has been read: the newest of its records and events, in memory that does not grow with
               steps
live           A run that goes on, as live views see it: the newest steps of every rank as arrays, and what was found
log_follower   What a job's profilers write of single collectives, followed while the job goes on: no view ever waits
               for it
recorded       A recorded run as a value: for notebooks, for comparisons, for exports
training_step  A recorded run as the step that `ringside.predict.what_if` changes: its own times, what it synchronised
               and how
"""
