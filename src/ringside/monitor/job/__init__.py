"""Verdicts on the whole job: bound by communication or input, uneven work, small collectives.

collectives      What collectives cost apart from their bytes, and which bucket size would cost least
episode          An episode of a job: a share that stays high for long enough begins one, and one that stays low ends it
gradient_memory  Where gradient buckets lie: in memory that the ranks of a host map, or in private memory that is copied
questions        The four questions of every profile, and how a run's records answer them
watcher          Verdicts on a whole job: bound by communication, by its input, or by too many small collectives
"""
