"""Notifications: hooks, metrics and alerts when a verdict is reached or withdrawn.

book      Alerts: which verdicts are firing, each sent once, and resolved when its cause has ended
counters  What a run adds up to: the one aggregate that `/metrics` is read from
hooks     Where alerts go: a URL that gets them as JSON, or a command that gets them on its standard input
live      Alerts of a run that is going on, on rank 0: what the user requested, hooks that are notified, and metrics
"""
