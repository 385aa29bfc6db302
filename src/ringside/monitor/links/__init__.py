"""Slow links: what the kernel counts of every connection, judged across hosts.

sampler    Wire per link: what each rank sent to each other host, and for how long the wire had it
slow_link  Which link is slow: pure judgement over the rates of links, against their own past and against the others'
tcp_info   What the kernel knows of this process's own TCP connections: bytes, and for how long the wire had them
watcher    The watcher of links: `slow_link`, one verdict for links that are slow together
"""
