"""Verdicts on the whole job: bound by communication or input, uneven work, small collectives.

collectives  What collectives cost apart from their bytes, and which bucket size would cost least
questions    The four questions of every profile, and how a run's records answer them
watcher      Verdicts on a whole job: bound by communication, by its input, or by too many small collectives
"""
