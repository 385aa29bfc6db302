"""Faults that are put into a training run on purpose, to see what notices them.

inject  Make one rank misbehave on purpose: for the demo, for tests, and for users who want to try their alerts; the
        faults there are, each a value with its words: `slow:rank=1,factor=1.3,from_step=40`
quota   A CPU quota on a process: a cgroup of its own, version 1 or 2; of one that was killed the next removes it
"""
