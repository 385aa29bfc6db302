"""Slow links: what the kernel counts of every connection, judged across hosts.

sampler  Wire per link: what each rank sent to each other host, and for how long the wire had it, as the kernel knows
watcher  The watcher of links: which one is slow, against its own past and against the others', and one verdict for
         those that are slow together
"""
